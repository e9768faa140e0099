"""Both ends in processes of their own, as they are in service, and what their deaths do."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.component.transfer.end_process import digest
from tests.component.transfer.rig import Plan, Rig, scattered
from tests.component.transfer.transports import Transport, source_pool, target_pool
from tests.fakes.waiting import PATIENCE_S

pytestmark = [pytest.mark.component]

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 1200
LINE_LIMIT_BYTES = 1 << 20
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _real_ones_only(transport: Transport) -> None:
    if not transport.across_processes:
        pytest.skip("works within one process only")


class Child:
    """An end in another process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.endpoint: dict[str, str] = {}

    async def order(self, *what: object) -> None:
        """Tells it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        await self.process.stdin.drain()

    async def hear(self, kind: str) -> list[Any]:
        """The rest of its next line of this kind. Raises TimeoutError, or ValueError if it ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := await self.process.stdout.readline():
                said: list[Any] = json.loads(line)
                if said[0] == kind:
                    return said[1:]
        raise ValueError(f"the other end is gone and never said {kind}")

    async def until_landed(self, plan: Plan) -> None:
        """Waits for every block of the plan."""
        missing = set(plan.blocks)
        while missing:
            reservation, blocks = await self.hear("Landed")
            if reservation == plan.reservation:
                missing -= set(blocks)


@asynccontextmanager
async def child(transport: Transport, role: str, seed: int = 0) -> AsyncIterator[Child]:
    """A process that is gone afterwards, also if it was stopped."""
    module = "tests.component.transfer.end_process"
    arguments = ("-m", module, transport.name, role, str(NUM_BLOCKS), str(BLOCK_BYTES), str(seed))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=pipe, stdout=pipe, limit=LINE_LIMIT_BYTES, cwd=REPOSITORY
    )
    made = Child(process)
    try:
        [made.endpoint] = await made.hear("ready")
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def as_lists(plan: Plan) -> list[list[int]]:
    """The plan's copies for a line of JSON."""
    return [[copy.index, copy.source, copy.slot] for copy in plan.copies]


@pytest.mark.everyday(2)
async def test_blocks_arrive_from_another_process(transport: Transport, rig: Rig, random: np.random.Generator) -> None:
    target = rig.receiver(target_pool(NUM_BLOCKS, BLOCK_BYTES))
    plan = scattered("r", 500, NUM_BLOCKS, random)
    plan.admit(target)
    async with child(transport, "send", seed=5) as sender:
        await sender.order("push", "r", target.endpoint, as_lists(plan))
        await target.until_landed("r", plan.blocks)
    plan.assert_arrived(source_pool(NUM_BLOCKS, BLOCK_BYTES, 5), target.pool)


@pytest.mark.everyday(2)
async def test_a_sender_killed_on_the_way_leaves_whole_blocks_and_another_one_finishes(
    transport: Transport, rig: Rig, random: np.random.Generator
) -> None:
    target, pool = rig.receiver(target_pool(NUM_BLOCKS, BLOCK_BYTES)), source_pool(NUM_BLOCKS, BLOCK_BYTES)
    plan = scattered("r", 1000, NUM_BLOCKS, random)
    plan.admit(target)
    async with child(transport, "send") as sender:
        await sender.order("push", "r", target.endpoint, as_lists(plan)[:900])
        await target.log.until(lambda: bool(target.landed("r")))
        sender.process.kill()
        await sender.process.wait()
    survivor = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES))
    marker = Plan("marker", 0, (0,), tuple(sorted(set(range(NUM_BLOCKS)) - set(plan.slots)))[:1])
    marker.admit(target)
    survivor.push("marker", target.endpoint, marker.copies)
    await target.until_landed("marker", [0])
    landed = target.landed("r")
    missing = sorted(set(plan.blocks) - set(landed))
    assert np.array_equal(target.pool[[plan.slots[i] for i in landed]], pool[[plan.sources[i] for i in landed]])
    survivor.push("r", target.endpoint, [plan.copies[i] for i in missing])
    await target.until_landed("r", plan.blocks)
    plan.assert_arrived(pool, target.pool)


@pytest.mark.everyday(2)
async def test_an_abort_drains_after_the_receiver_was_killed(
    transport: Transport, rig: Rig, random: np.random.Generator
) -> None:
    source = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES))
    plan = scattered("r", 1000, NUM_BLOCKS, random)
    async with child(transport, "receive") as receiver:
        await receiver.order("admit", "r", 0, plan.slots)
        await receiver.hear("admitted")
        source.push("r", receiver.endpoint, plan.copies)
        await receiver.hear("Landed")
        receiver.process.kill()
        await receiver.process.wait()
        await source.abort("r")


@pytest.mark.everyday(2)
async def test_a_stopped_receiver_delays_no_abort_and_is_used_again_after_it(
    transport: Transport, rig: Rig, random: np.random.Generator
) -> None:
    """The abort has to close the connection under the other reservation, which fails: its handoff gets a new one."""
    if transport.one_sided:
        pytest.skip("a one-sided write cannot be taken back: see test_nixl.py")
    source = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES))
    slots = random.permutation(NUM_BLOCKS).tolist()
    doomed = scattered("doomed", 400, NUM_BLOCKS, random, slots=slots[:400])
    kept = scattered("kept", 400, NUM_BLOCKS, random, slots=slots[400:800])
    async with child(transport, "receive") as receiver:
        for plan in (doomed, kept):
            await receiver.order("admit", plan.reservation, 0, plan.slots)
            await receiver.hear("admitted")
        receiver.process.send_signal(signal.SIGSTOP)
        for first in range(0, 400, 4):
            source.push("kept", receiver.endpoint, kept.copies[first : first + 4])
            source.push("doomed", receiver.endpoint, doomed.copies[first : first + 4])
        await source.until_begun()
        await source.abort("doomed")
        await source.log.until(lambda: bool(source.failures("kept")))
        await source.abort("kept")
        receiver.process.send_signal(signal.SIGCONT)
        again = scattered("again", 200, NUM_BLOCKS, random, slots=slots[800:1000])
        await receiver.order("admit", again.reservation, 0, again.slots)
        await receiver.hear("admitted")
        source.push(again.reservation, receiver.endpoint, again.copies)
        await receiver.until_landed(again)
        await receiver.order("digest", again.slots)
        assert await receiver.hear("digest") == [digest(source.pool, list(again.sources))]
