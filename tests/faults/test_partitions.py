"""Two processes that both live cannot reach each other: nobody else notices, and no client but by a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.storm.bench import Bench, open_bench
from tests.faults.storm.network import Way
from tests.faults.storm.processes import StackSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
LASTS = 2.2
"""In peer timeouts: longer than either end waits."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path_factory.mktemp("partitions"), StackSettings(num_routers=2)) as bench:
        yield bench


@pytest.mark.parametrize(
    ("way", "both"),
    [(Way.CUT, True), (Way.STALLED, True), (Way.STALLED, False)],
    ids=["reset", "silent", "silent one way"],
)
async def test_prefill_and_decode_cannot_reach_each_other(bench: Bench, way: Way, both: bool) -> None:
    """Another decode worker takes over what prefill has computed: no attempt fails."""
    stack = bench.stack
    before = await stack.fleet()

    async def disturb() -> None:
        await stack.until_busy("decode-0", "reserved")
        stack.network.set("prefill-0", "decode-0", way)
        if both:
            stack.network.set("decode-0", "prefill-0", way)
        await asyncio.sleep(LASTS * stack.settings.peer_timeout_s)
        assert {worker["state"] for worker in (await stack.workers()).values()} == {"ready"}
        stack.network.heal()

    await bench.under_load(bench.load("router-0"), await bench.jobs(8), disturb)
    after = await stack.fleet()
    assert after["requests"]["retries"] == before["requests"]["retries"]
    await stack.until_clean()


async def test_a_router_and_a_worker_cannot_reach_each_other(bench: Bench) -> None:
    """The other router keeps using the worker."""
    stack = bench.stack
    before = await stack.fleet("router-1")

    async def disturb() -> None:
        await stack.until_busy("decode-0", "running")
        for ends in (("router-0", "decode-0"), ("decode-0", "router-0")):
            stack.network.set(*ends, Way.STALLED)
        await asyncio.sleep(LASTS * stack.settings.peer_timeout_s)
        assert (await stack.workers("router-0"))["decode-0"]["state"] == "lost"
        assert (await stack.workers("router-1"))["decode-0"]["state"] == "ready"
        stack.network.heal()

    await bench.under_load(bench.load(), await bench.jobs(8), disturb)
    after = await stack.fleet("router-1")
    assert after["requests"]["retries"] == before["requests"]["retries"]
    await stack.until_clean()
