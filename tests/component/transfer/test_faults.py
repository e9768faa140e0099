"""What a transport does under each fault: nothing wrong counts as landed, nothing lands once it drained, and whoever
asks again for what is missing gets it, or hears that it failed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.transfer.base import Corrupted, Landed, ReceiverEvent, SenderEvent
from tests.component.transfer.rig import Plan, ReceivingEnd, SendingEnd, scattered
from tests.component.transfer.transports import (
    MEMORY,
    MEMORY_ONE_SIDED,
    WRAPPED,
    Transport,
    inner_memory,
    source_pool,
    target_pool,
)
from tests.fakes.fault_schedule import POSSIBLE, Every, Fault, Faults, Point, Schedule, Script, Seeded, parse_schedule
from tests.fakes.faulty_transport import FaultyReceiver, FaultySender, InnerSender
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.fakes.waiting import PATIENCE_S
from tests.thoroughness import examples

pytestmark = [pytest.mark.component]

NUM_BLOCKS, BLOCK_BYTES, COUNT = 160, 8 * 1024, 100
ASK_AGAIN_AFTER_S = 0.15
EVERYTHING: dict[Fault, float] = dict.fromkeys(set(Fault) - {Fault.NONE, Fault.DIE}, 0.08)


@dataclass
class Couple:
    """Two ends of a faulty transport, a plan between them, and a check of every block at the moment it lands."""

    source: SendingEnd
    target: ReceivingEnd
    plan: Plan
    num_pushes: Counter[int] = field(default_factory=Counter)  # by block
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(self.plan.blocks)
        self.target.log.tell = self._take

    def _take(self, event: SenderEvent | ReceiverEvent) -> None:
        if isinstance(event, Corrupted):
            self.missing.update(event.blocks)
        if isinstance(event, Landed):
            self.missing.difference_update(event.blocks)
            for block in event.blocks:
                if self.target.receiver.needs_quarantine and self.num_pushes[block] > 1:
                    continue  # a repeated write may have damaged it: it is compared again at the end
                place = block - self.plan.first_block
                slot, origin = self.plan.slots[place], self.plan.sources[place]
                assert np.array_equal(self.target.pool[slot], self.source.pool[origin]), "wrong bytes were reported"

    def push(self, blocks: Iterable[int]) -> None:
        """Pushes those of the blocks that are not in flight, as prefill does."""
        copies, has_left = self.plan.copies, Counter(self.source.pushed("r"))
        blocks = sorted(block for block in blocks if self.num_pushes[block] <= has_left[block])
        self.num_pushes.update(blocks)
        self.source.push("r", self.target.endpoint, [copies[block - self.plan.first_block] for block in blocks])

    async def transfer(self, ask_again_after_s: float = ASK_AGAIN_AFTER_S) -> str:
        """As decode does: what does not come, or comes wrong, is asked for again; "" when all landed, or a cause.

        Blocks that were pushed more than once are compared with their checksums when all writes have left.
        """
        while True:
            cause = await self._until_all_landed(ask_again_after_s)
            if cause or not self.target.receiver.needs_quarantine:
                return cause
            await self.source.log.until(lambda: self._have_left() or bool(self.source.failures("r")))
            repeated = [block for block, number in self.num_pushes.items() if number > 1]
            num_events = len(self.target.log.events)
            self.missing.update(repeated)
            self.target.receiver.recheck("r", repeated)
            await self.target.log.until(lambda before=num_events: not self.missing or self._is_corrupted(before))  # type: ignore[misc]
            if not self.missing:
                return ""

    def _have_left(self) -> bool:
        return Counter(self.source.pushed("r")) >= self.num_pushes

    async def _until_all_landed(self, ask_again_after_s: float) -> str:
        self.push(self.missing)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            num_events = len(self.target.log.events)
            try:
                async with asyncio.timeout(ask_again_after_s):
                    await self.target.log.until(lambda before=num_events: self._has_news(before))  # type: ignore[misc]
            except TimeoutError:
                pass
            if not self.missing:
                return ""
            if self.source.failures("r"):
                return self.source.failures("r")[0]
            if len(self.target.log.events) == num_events or self._is_corrupted(num_events):
                self.push(self.missing)
        raise AssertionError(f"no outcome: {len(self.missing)} blocks are missing")

    def _has_news(self, before: int) -> bool:
        return not self.missing or self._is_corrupted(before) or bool(self.source.failures("r"))

    def _is_corrupted(self, before: int) -> bool:
        return any(isinstance(event, Corrupted) for event in self.target.log.events[before:])

    async def assert_drained_is_the_end(self) -> None:
        """Nothing is written after the sender drained; or, where the receiver copies, after it released."""
        await self.source.abort("r")
        drained = self.target.pool.copy()
        self.target.receiver.release("r")
        before = drained if self.target.receiver.needs_quarantine else self.target.pool.copy()
        await asyncio.sleep(0.1)
        assert np.array_equal(self.target.pool, before)


Builder = Callable[..., Couple]


@pytest.fixture(params=list(WRAPPED.values()), ids=list(WRAPPED))
def inner(request: pytest.FixtureRequest) -> tuple[Transport, InnerSender]:
    transport, make_inner = request.param
    if transport.why_not:
        pytest.skip(transport.why_not)
    return transport, make_inner


@pytest.fixture
def couple(inner: tuple[Transport, InnerSender]) -> Iterator[Builder]:
    """Makes ends that are closed when the test is over."""
    made: list[Couple] = []

    def build(sender: Faults, receiver: Faults | None = None, *, checksums: bool = True) -> Couple:
        made.append(make_couple(*inner, sender, receiver or Faults(), checksums=checksums))
        return made[-1]

    yield build
    for one in made:
        close(one)


def make_couple(
    transport: Transport, make_inner: InnerSender, sender: Faults, receiver: Faults, *, checksums: bool = True
) -> Couple:
    pool = source_pool(NUM_BLOCKS, BLOCK_BYTES)
    source = SendingEnd(pool, FaultySender(pool, make_inner, sender, checksums=checksums))
    landing = target_pool(NUM_BLOCKS, BLOCK_BYTES)
    target = ReceivingEnd(landing, FaultyReceiver(transport.make_receiver(landing), receiver))
    source.sender.start(source.log.add)
    target.receiver.start(target.log.add)
    plan = scattered("r", COUNT, NUM_BLOCKS, np.random.default_rng(3), first_block=2)
    plan.admit(target)
    return Couple(source, target, plan)


def close(one: Couple) -> None:
    one.source.sender.close()
    one.target.receiver.close()


@pytest.mark.parametrize("number", [1, 6, 13])
@pytest.mark.parametrize("fault", sorted(POSSIBLE[Point.PUSH] - {Fault.NONE, Fault.DIE}))
async def test_one_fault_of_a_message_costs_at_most_a_repetition(couple: Builder, fault: Fault, number: int) -> None:
    faults = Faults(Script({(Point.PUSH, number): fault}))
    one = couple(faults)
    assert await one.transfer() == ""
    assert faults.log == [(Point.PUSH, number, fault)]
    one.plan.assert_arrived(one.source.pool, one.target.pool)
    one.target.assert_untouched(set(range(NUM_BLOCKS)) - set(one.plan.slots))
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        (point, fault)
        for point in (Point.PUSHED, Point.DRAINED, Point.LANDED)
        for fault in sorted(POSSIBLE[point] - {Fault.NONE, Fault.DIE})
    ],
)
async def test_reports_that_are_late_mixed_up_or_doubled_do_no_harm(
    couple: Builder, point: Point, fault: Fault
) -> None:
    one = couple(Faults(Every(point, fault)), Faults(Every(point, fault)))
    assert await one.transfer() == ""
    await one.source.log.until(lambda: set(one.source.pushed("r")) == set(one.plan.blocks))
    await one.assert_drained_is_the_end()


async def test_a_connection_that_breaks_is_reported_and_drains(couple: Builder) -> None:
    one = couple(Faults(Script({(Point.PUSH, 5): Fault.DIE})))
    assert await one.transfer() == "the connection broke"
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.CORRUPT])
async def test_blocks_that_never_come_true_never_land(couple: Builder, fault: Fault) -> None:
    one = couple(Faults(Every(Point.PUSH, fault)))
    spoiled = 8 if fault is Fault.DROP else 1  # of each message
    for _ in range(3):
        one.push(one.missing)
        await one.source.log.until(lambda: not set(one.plan.blocks) - set(one.source.pushed("r")))
        await asyncio.sleep(0.05)
    assert len(one.missing) >= spoiled
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("moment", [1, 7, 13])
@pytest.mark.parametrize("fault", sorted(POSSIBLE[Point.PUSH] - {Fault.NONE}))
async def test_an_abort_in_the_middle_of_a_fault_drains(couple: Builder, fault: Fault, moment: int) -> None:
    one = couple(Faults(Every(Point.PUSH, fault)))
    one.push(list(one.plan.blocks)[: 8 * moment])
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_seed_brings_ends_with_the_right_bytes(couple: Builder, seed: int) -> None:
    one = couple(Faults(Seeded(seed, EVERYTHING)), Faults(Seeded(seed, EVERYTHING)))
    assert await one.transfer() == ""
    one.plan.assert_arrived(one.source.pool, one.target.pool)
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("seed", range(4))
async def test_blocks_that_are_only_late_and_are_damaged_by_their_repetition_are_found(
    couple: Builder, seed: int
) -> None:
    one = couple(Faults(Seeded(seed, EVERYTHING)), Faults(Seeded(seed, EVERYTHING)))
    assert await one.transfer(ask_again_after_s=0.0) == ""
    one.plan.assert_arrived(one.source.pool, one.target.pool)
    await one.assert_drained_is_the_end()


async def test_a_repeated_write_that_damages_a_landed_block_is_found_by_a_recheck(couple: Builder) -> None:
    one = couple(Faults(Script({(Point.PUSH, 2): Fault.CORRUPT})))
    first = list(one.plan.blocks)[:8]
    for _ in range(2):
        one.push(first)
        await one.source.log.until(one._have_left)
        await one.target.log.until(lambda: not set(first) & one.missing)
    is_damaged = one.target.receiver.needs_quarantine
    one.target.receiver.recheck("r", first)
    seen = [Landed("r", tuple(first[:7])), Corrupted("r", (first[7],))] if is_damaged else [Landed("r", tuple(first))]
    await one.target.log.until(lambda: one.target.log.events[-len(seen) :] == seen)
    one.push(one.missing)
    await one.target.log.until(lambda: not set(first) & one.missing)
    for block, copy in zip(first, one.plan.copies, strict=False):
        assert np.array_equal(one.target.pool[copy.slot], one.source.pool[copy.source]), block


async def test_without_checksums_a_corrupted_block_goes_unnoticed(couple: Builder) -> None:
    """Which is what they are for: else the tests above would prove nothing."""
    one = couple(Faults(Script({(Point.PUSH, 1): Fault.CORRUPT})), checksums=False)
    one.target.log.tell = None
    # Pushed once: a second push, after some time without news, would repair the block on the wire.
    one.push(one.missing)
    await one.target.until_landed("r", one.plan.blocks)
    wrong = [
        block
        for block, slot, origin in zip(one.plan.blocks, one.plan.slots, one.plan.sources, strict=True)
        if not np.array_equal(one.target.pool[slot], one.source.pool[origin])
    ]
    assert len(wrong) == 1


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), one_sided=st.booleans())
def test_a_run_is_replayed_from_its_log(seed: int, one_sided: bool) -> None:
    shares = EVERYTHING | {Fault.DIE: 0.01}
    transport = MEMORY_ONE_SIDED if one_sided else MEMORY

    async def run(schedules: tuple[Schedule, Schedule]) -> tuple[str, tuple[Script, Script], bytes]:
        faults = [Faults(schedule, delay_s=0.001, stall_s=0.003) for schedule in schedules]
        one = make_couple(transport, inner_memory, *faults)
        try:
            one.push(one.missing)
            await asyncio.sleep(0.02)
            await one.source.abort("r")
            return str(one.source.failures("r")), (faults[0].replay(), faults[1].replay()), one.target.pool.tobytes()
        finally:
            close(one)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        outcome, logs, pool = runner.run(run((Seeded(seed, shares), Seeded(seed + 1, shares))))
        again, same_logs, same_pool = runner.run(run(logs))
    assert (again, same_logs) == (outcome, logs)
    assert same_pool == pool


def test_a_schedule_is_read_from_json_and_impossible_ones_are_refused() -> None:
    assert parse_schedule('{"faults": [["push", 3, "drop"]]}') == Script({(Point.PUSH, 3): Fault.DROP})
    assert parse_schedule('{"seed": 7, "shares": {"delay": 0.5}}') == Seeded(7, {Fault.DELAY: 0.5})
    with pytest.raises(ValueError, match="not possible"):
        parse_schedule('{"faults": [["drained", 1, "drop"]]}')


def test_a_command_goes_before_the_schedule() -> None:
    faults = Faults(Script({(Point.PUSH, 1): Fault.DROP, (Point.PUSH, 2): Fault.DELAY}))
    faults.command(Point.PUSH, Fault.CORRUPT)
    assert [faults.at(Point.PUSH) for _ in range(3)] == [Fault.CORRUPT, Fault.DELAY, Fault.NONE]
