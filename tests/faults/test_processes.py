"""Workers are killed and stopped at chosen moments of a load: every client's output is that of an undisturbed run.

The model is real, in float32; half of the requests are greedy, the others seeded. Most are drafted, and some search
with beams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrelay.config.router import RouterConfig
from tests.faults.storm.bench import Bench, open_bench
from tests.faults.storm.processes import Role, StackSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

OWNERS = {"prefill": "computing", "decode": "running"}
"""Of the blocks that a worker of this role holds while it works."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    # Every worker is to have work, whoever holds the prompts already.
    settings = StackSettings(extra={"router": ["--routing-policy=least_loaded"]})
    async with open_bench(tmp_path_factory.mktemp("processes"), settings) as bench:
        yield bench


@pytest.mark.parametrize(
    ("names", "delay_s"),
    [
        (("prefill-0",), 0.0),
        (("prefill-1",), 0.3),
        pytest.param(("decode-0",), 0.0, marks=pytest.mark.always),
        (("decode-1",), 1.0),
        (("prefill-0", "prefill-1"), 0.0),
        (("decode-0", "decode-1"), 0.0),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else f"{value}s",
)
async def test_workers_of_a_role_die_together(bench: Bench, names: tuple[str, ...], delay_s: float) -> None:
    """A while after the first of them has work. Decode computes prompts meanwhile, or streams wait for the next."""
    stack = bench.stack

    async def disturb() -> None:
        old = await stack.incarnations()
        await stack.until_busy(names[0], OWNERS[stack.services[names[0]].role])
        await asyncio.sleep(delay_s)
        for name in names:
            stack.kill(name)
        for name in names:
            stack.spawn(name)
        await stack.until_ready(*names, since=old)

    await bench.under_load(bench.load(), await bench.jobs(12, num_beam_searches=4), disturb)
    await stack.until_clean()


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
async def test_a_worker_stands_still_for_longer_than_its_peers_wait(bench: Bench, name: str) -> None:
    """It wakes up in the middle of what others do by now; it is the same process before and after."""
    stack = bench.stack

    async def disturb() -> None:
        await stack.until_busy(name, OWNERS[stack.services[name].role])
        await stack.stand_still(name, stack.settings.peer_timeout_s + 2)

    old = await stack.incarnations()
    await bench.under_load(bench.load(), await bench.jobs(12, num_beam_searches=4), disturb)
    await stack.until_clean()
    assert await stack.incarnations() == old
    totals = [worker["totals"] for worker in (await stack.workers()).values()]
    drafted, accepted = (sum(each.get(f"{kind}_tokens", 0) for each in totals) for kind in ("drafted", "accepted"))
    assert 0 < accepted < drafted


async def test_over_nixl_three_of_four_workers_fail_at_once(tmp_path: Path) -> None:
    """Two die, and the decode worker that is left stands still for so long that the connections to it break. While
    these are not made again, no pair can hand over, and a retry does without."""
    extra: dict[Role, list[str]] = {"router": ["--routing-policy=least_loaded", "--local-prefill-tokens=0"]}
    default = RouterConfig()
    settings = StackSettings(
        transport="nixl", max_attempts=default.max_attempts, peer_timeout_s=default.peer_timeout_s, extra=extra
    )
    async with open_bench(tmp_path, settings) as bench:
        stack = bench.stack

        async def disturb() -> None:
            old = await stack.incarnations()
            await stack.until_busy("decode-1", OWNERS["decode"])
            for name in ("decode-0", "prefill-0"):
                stack.kill(name)
                stack.spawn(name)
            await stack.stand_still("decode-1", 2 * settings.peer_timeout_s)
            await stack.until_ready("decode-0", "prefill-0", since=old)

        await bench.under_load(bench.load(), await bench.jobs(12), disturb)
        await stack.until_clean()
