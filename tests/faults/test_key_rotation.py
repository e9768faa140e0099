"""The fleet's CURVE key rotates under load as docs/runbook.md says: no request fails, no output changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrelay.curve import CurveKey
from tests.faults.storm.bench import Bench, open_bench
from tests.faults.storm.processes import Role, StackSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

ROLES: tuple[Role, ...] = ("router", "prefill", "decode")
OLD, NEW = CurveKey.new(), CurveKey.new()


@pytest.fixture(scope="module")
def key_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One for each role, as on three machines."""
    files = [tmp_path_factory.mktemp("keys") / role for role in ROLES]
    for path in files:
        path.write_text(OLD.text())
        path.chmod(0o600)
    return files


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(key_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    extra = {role: [f"--curve-key-file={path}"] for role, path in zip(ROLES, key_files, strict=True)}
    settings = StackSettings(num_routers=2, drain_timeout_s=600.0, extra=extra)
    async with open_bench(tmp_path_factory.mktemp("rotation"), settings) as bench:
        yield bench


def write(files: list[Path], *keys: CurveKey) -> None:
    """One file after the other is replaced, as an operator does."""
    for path in files:
        changed = path.with_suffix(".new")
        changed.write_text("".join(key.text() for key in keys))
        changed.chmod(0o600)
        changed.replace(path)


async def restart(bench: Bench, name: str) -> None:
    stack = bench.stack
    old = await stack.known_incarnations()
    if name in stack.names("router"):
        assert (await stack.fleet(name))["requests"]["failed"] == 0
    stack.terminate(name)
    assert await stack.until_gone(name) == 0
    stack.spawn(name)
    if name in stack.names("router"):
        await stack.until_router_serves(name)
    else:
        await stack.until_ready(name, since=old)


async def keys_in_use(bench: Bench) -> set[str]:
    """Fingerprints in the addresses that the routers show."""
    fleets = [await bench.stack.fleet(router) for router in bench.stack.names("router")]
    addresses = [each["address"] for fleet in fleets for each in (*fleet["workers"], fleet["router"])]
    return {address.partition("#")[2] for address in addresses}


async def test_the_key_rotates_under_load(bench: Bench, key_files: list[Path]) -> None:
    stack = bench.stack

    async def rotate() -> None:
        write(key_files, OLD, NEW)
        write(key_files, NEW, OLD)
        for name in sorted(stack.names(*ROLES), key=lambda name: name[-1]):  # mixed, so that all pairs of keys meet
            await restart(bench, name)
        assert await keys_in_use(bench) == {NEW.fingerprint}
        write(key_files, NEW)
        await restart(bench, "decode-0")

    assert await keys_in_use(bench) == {OLD.fingerprint}
    load = bench.load()
    await bench.under_load(load, await bench.jobs(8), rotate)
    print(f"{load.counts}")
    assert load.counts["equal"] >= 8
    assert not any("503" in count for count in load.counts), load.counts
    for router in stack.names("router"):
        assert (await stack.fleet(router))["requests"]["failed"] == 0
    await stack.until_clean()
    said = [line for each in stack.services.values() for line in each.log_path.read_text().splitlines()]
    assert not [line for line in said if "key in common" in line or "prove another key" in line]
