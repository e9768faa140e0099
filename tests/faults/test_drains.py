"""Workers drain while others die or stand still: no request fails, every output is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.component.transfer.transports import NO_NIXL
from tests.faults.storm.bench import Bench, open_bench
from tests.faults.storm.processes import StackSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


def settings(transport: str) -> StackSettings:
    """Three decode workers: one is left when one drains and one dies, however long a start takes here. A drain that
    waits for what never comes would take longer than any test waits for it."""
    return StackSettings(transport=transport, num_prefill=2, num_decode=3, drain_timeout_s=600.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["zmq", "nixl"])
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    if request.param == "nixl" and NO_NIXL:
        pytest.skip(NO_NIXL)
    async with open_bench(tmp_path_factory.mktemp("drains"), settings(request.param)) as bench:
        yield bench


async def restarted(bench: Bench, name: str, old: dict[str, str]) -> None:
    """After its drain, which must end well."""
    assert await bench.stack.until_gone(name) == 0
    bench.stack.spawn(name)
    await bench.stack.until_ready(name, since=old)


@pytest.mark.parametrize(
    ("drained", "killed", "state"),
    [
        ("prefill-0", "decode-0", "in_flight"),
        ("decode-0", "prefill-0", "reserved"),
        ("decode-0", "decode-1", "reserved"),
    ],
)
async def test_a_worker_drains_while_another_dies(bench: Bench, drained: str, killed: str, state: str) -> None:
    """SIGTERM comes while handoffs are in flight."""
    stack = bench.stack

    async def disturb() -> None:
        old = await stack.incarnations()
        await stack.until_busy(drained, state)
        stack.terminate(drained)
        stack.kill(killed)
        stack.spawn(killed)
        await asyncio.gather(restarted(bench, drained, old), stack.until_ready(killed, since=old))

    await bench.under_load(bench.load(), await bench.jobs(12), disturb)
    await stack.until_clean()


async def test_a_rolling_restart_in_any_order_fails_nothing(bench: Bench) -> None:
    stack = bench.stack
    seed = int(time.time())
    print(f"seed {seed}")
    before = (await stack.fleet())["requests"]

    rng = random.Random(seed)

    async def roll(names: list[str]) -> None:
        for name in rng.sample(names, len(names)):
            old = await stack.incarnations()
            stack.terminate(name)
            await restarted(bench, name, old)

    async def disturb() -> None:
        await asyncio.gather(roll(stack.names("prefill")), roll(stack.names("decode")))

    load = bench.load()
    await bench.under_load(load, await bench.jobs(8), disturb)
    assert load.counts["asked again after 503"] == 0
    after = (await stack.fleet())["requests"]
    assert after["failed"] == before["failed"]
    await stack.until_clean()


async def test_a_decode_worker_drains_although_a_prefill_worker_stands_still(bench: Bench) -> None:
    """What that one was to send is not waited for beyond its silence."""
    stack = bench.stack

    async def disturb() -> None:
        old = await stack.incarnations()
        await stack.until_busy("decode-0", "reserved")
        stack.stop("prefill-0")
        stack.terminate("decode-0")
        assert await stack.until_gone("decode-0") == 0
        stack.spawn("decode-0")
        await stack.until_ready("decode-0", since=old)
        stack.resume("prefill-0")

    await bench.under_load(bench.load(), await bench.jobs(12), disturb)
    await stack.until_clean()
    assert stack.services["prefill-0"].is_running
