"""What a transport does under each fault: nothing wrong counts as landed, and nothing lands
once it drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvrelay.handoff.transports.base import Corrupted, Landed, ReceiverEvent, SenderEvent
from tests.component.transfer.rig import Plan, ReceivingEnd, SendingEnd, scattered
from tests.component.transfer.transports import (
    WRAPPED,
    Transport,
    source_pool,
    target_pool,
)
from tests.fakes.faulty_transport import (
    POSSIBLE,
    Every,
    Fault,
    Faults,
    FaultyReceiver,
    FaultySender,
    InnerSender,
    Point,
    Script,
    Seeded,
)

pytestmark = [pytest.mark.component]

NUM_BLOCKS, BLOCK_BYTES, COUNT = 160, 8 * 1024, 100
EVERYTHING: dict[Fault, float] = dict.fromkeys(set(Fault) - {Fault.NONE, Fault.DIE}, 0.08)


@dataclass
class Couple:
    """Two ends of a faulty transport, a plan between them, and a check of every block at the moment it lands."""

    source: SendingEnd
    target: ReceivingEnd
    plan: Plan
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(self.plan.blocks)
        self.target.log.tell = self._take

    def _take(self, event: SenderEvent | ReceiverEvent) -> None:
        if isinstance(event, Landed):
            self.missing.difference_update(event.blocks)
            for block in event.blocks:
                place = block - self.plan.first_block
                slot, origin = self.plan.slots[place], self.plan.sources[place]
                assert np.array_equal(self.target.pool[slot], self.source.pool[origin]), "wrong bytes were reported"

    @property
    def is_corrupted(self) -> bool:
        return any(isinstance(event, Corrupted) for event in self.target.log.events)

    def push(self, blocks: Iterable[int]) -> None:
        copies = self.plan.copies
        self.source.push("r", self.target.endpoint, [copies[block - self.plan.first_block] for block in sorted(blocks)])

    async def transfer(self) -> None:
        """Pushes all blocks, and waits until all have landed or the source has reported each or a failure."""
        self.push(self.missing)
        await self.target.log.until(lambda: not self.missing)

    async def assert_drained_is_the_end(self) -> None:
        """Nothing is written after the sender drained; or, where the receiver copies, after it released."""
        await self.source.abort("r")
        drained = self.target.pool.copy()
        self.target.receiver.release("r")
        before = drained if self.target.receiver.is_one_sided else self.target.pool.copy()
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
@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.REORDER, Fault.DUPLICATE, Fault.STALL])
async def test_a_late_or_doubled_message_arrives(couple: Builder, fault: Fault, number: int) -> None:
    faults = Faults(Script({(Point.PUSH, number): fault}))
    one = couple(faults)
    await one.transfer()
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
    await one.transfer()
    await one.source.log.until(lambda: set(one.source.pushed("r")) == set(one.plan.blocks))
    await one.assert_drained_is_the_end()


async def test_a_connection_that_breaks_is_reported_and_drains(couple: Builder) -> None:
    one = couple(Faults(Script({(Point.PUSH, 5): Fault.DIE})))
    one.push(one.missing)
    await one.source.log.until(lambda: one.source.failures("r") == ["the connection broke"])
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.CORRUPT])
async def test_blocks_that_are_lost_or_corrupted_never_land(couple: Builder, fault: Fault) -> None:
    one = couple(Faults(Script({(Point.PUSH, 2): fault})))
    one.push(one.missing)
    spoiled = 8 if fault is Fault.DROP else 1  # of a message
    await one.target.log.until(lambda: len(one.missing) == spoiled)
    await one.source.log.until(lambda: not set(one.plan.blocks) - set(one.source.pushed("r")))
    await one.target.log.until(lambda: one.is_corrupted == (fault is Fault.CORRUPT))
    assert len(one.missing) == spoiled
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("moment", [1, 7, 13])
@pytest.mark.parametrize("fault", sorted(POSSIBLE[Point.PUSH] - {Fault.NONE}))
async def test_an_abort_in_the_middle_of_a_fault_drains(couple: Builder, fault: Fault, moment: int) -> None:
    one = couple(Faults(Every(Point.PUSH, fault)))
    one.push(list(one.plan.blocks)[: 8 * moment])
    await one.assert_drained_is_the_end()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_seed_brings_lands_right_or_not_at_all(couple: Builder, seed: int) -> None:
    one = couple(Faults(Seeded(seed, EVERYTHING)), Faults(Seeded(seed, EVERYTHING)))
    one.push(one.missing)
    await one.source.log.until(lambda: not set(one.plan.blocks) - set(one.source.pushed("r")))
    await one.assert_drained_is_the_end()


async def test_without_checksums_a_corrupted_block_goes_unnoticed(couple: Builder) -> None:
    """Which is what they are for: else the tests above would prove nothing."""
    one = couple(Faults(Script({(Point.PUSH, 1): Fault.CORRUPT})), checksums=False)
    one.target.log.tell = None
    one.push(one.missing)
    await one.target.until_landed("r", one.plan.blocks)
    wrong = [
        block
        for block, slot, origin in zip(one.plan.blocks, one.plan.slots, one.plan.sources, strict=True)
        if not np.array_equal(one.target.pool[slot], one.source.pool[origin])
    ]
    assert len(wrong) == 1
