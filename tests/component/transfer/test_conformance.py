"""What holds for every transfer, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvrelay.handoff.transports.base import BlockPush, SenderDrained
from kvrelay.handoff.transports.zmq_sender import SenderSettings
from tests.component.transfer.rig import Plan, ReceivingEnd, Rig, SendingEnd, scattered, send_all
from tests.component.transfer.transports import source_pool, target_pool

pytestmark = [pytest.mark.component]

KIB = 1024


@pytest.mark.parametrize(
    ("block_kib", "num_blocks", "count"),
    [(1, 40, 1), (1, 12_000, 10_000), (16, 1000, 600), (64, 200, 90), (512, 40, 25), (2048, 10, 7)],
)
async def test_scattered_blocks_arrive_and_nothing_else_is_touched(
    rig: Rig, random: np.random.Generator, block_kib: int, num_blocks: int, count: int
) -> None:
    source = rig.sender(source_pool(num_blocks, block_kib * KIB))
    target = rig.receiver(target_pool(num_blocks, block_kib * KIB))
    plan = scattered("r", count, num_blocks, random, first_block=3)
    await send_all(source, target, plan)
    await source.until_pushed("r", plan.blocks)
    plan.assert_arrived(source.pool, target.pool)
    target.assert_untouched(set(range(num_blocks)) - set(plan.slots))


@dataclass(eq=False)
class Journey:
    """What of a plan is pushed in each call, some of it more than once. `ends_early`: aborted on the way."""

    source: SendingEnd
    target: ReceivingEnd
    plan: Plan
    pushes: list[list[BlockPush]]
    ends_early: bool


def random_journey(source: SendingEnd, target: ReceivingEnd, number: int, random: np.random.Generator) -> Journey:
    """Up to 100 blocks to slots of which it has the 120 from `120 * number` on to itself."""
    count = int(random.integers(1, 101))
    first_source, first_slot = int(random.integers(300)), 120 * number + int(random.integers(20))
    run = np.arange(count)
    swapped = np.concatenate([run[:1], random.permutation(run[1:-1]), run[1:][-1:]])  # its ends look like a run
    sources = (
        run + first_source,
        swapped + first_source,
        random.permutation(400)[:count],
        random.integers(400, size=count),
    )
    slots = (run, swapped, random.permutation(count))
    taken, given = sources[random.integers(len(sources))], first_slot + slots[random.integers(len(slots))]
    plan = Plan(f"r{number}", int(random.integers(5)), tuple(taken.tolist()), tuple(given.tolist()))
    copies, cut = plan.copies, int(random.integers(1, 101))
    if random.integers(2):
        copies = [copies[index] for index in random.permutation(count)]
    pushes = [copies[first : first + cut] for first in range(0, count, cut)]
    again = [pushes[int(random.integers(len(pushes)))] for _ in range(random.integers(3))]
    return Journey(source, target, plan, pushes + again, bool(random.random() < 0.25))


@pytest.mark.parametrize("seed", range(5))
async def test_random_traffic(rig: Rig, seed: int) -> None:
    """Of three senders to two receivers: runs, what looks like one, scattered and repeated blocks; some end early."""
    random = np.random.default_rng(seed)
    sources = [rig.sender(source_pool(400, 16 * KIB, number)) for number in range(3)]
    targets = [rig.receiver(target_pool(16 * 120, 16 * KIB)) for _ in range(2)]
    journeys = [random_journey(sources[number % 3], targets[number % 2], number, random) for number in range(16)]
    for journey in journeys:
        journey.plan.admit(journey.target)
    pushes = [(journey, copies) for journey in journeys for copies in journey.pushes]
    aborted: list[Journey] = []
    for turn, index in enumerate(random.permutation(len(pushes))):
        journey, copies = pushes[index]
        if journey not in aborted:
            journey.source.push(journey.plan.reservation, journey.target.endpoint, copies)
        if turn == len(pushes) // 2:
            aborted = [journey for journey in journeys if journey.ends_early]
            for journey in aborted:
                await journey.source.abort(journey.plan.reservation)
    for journey in journeys:
        if journey not in aborted:
            await journey.target.until_landed(journey.plan.reservation, journey.plan.blocks)
            every = [copy.index for copies in journey.pushes for copy in copies]
            await journey.source.until_pushed(journey.plan.reservation, every)
            journey.plan.assert_arrived(journey.source.pool, journey.target.pool)
    for target in targets:
        slots = {slot for journey in journeys if journey.target is target for slot in journey.plan.slots}
        target.assert_untouched(set(range(16 * 120)) - slots)


async def test_no_block_lands_without_admission(rig: Rig, random: np.random.Generator) -> None:
    """One that is written one-sidedly cannot be kept out, but it does not count."""
    source, target = rig.sender(source_pool(100, 16 * KIB)), rig.receiver(target_pool(100, 16 * KIB))
    slots = random.permutation(100).tolist()
    admitted = scattered("known", 20, 100, random, slots=slots[:20])
    stranger = scattered("unknown", 20, 100, random, slots=slots[20:40])
    admitted.admit(target)
    source.push("unknown", target.endpoint, stranger.copies)
    source.push("known", target.endpoint, admitted.copies)
    await target.until_landed("known", admitted.blocks)
    admitted.assert_arrived(source.pool, target.pool)
    assert target.landed("unknown") == []
    if not target.receiver.is_one_sided:
        target.assert_untouched(set(range(100)) - set(admitted.slots))


@pytest.mark.parametrize("num_landed_before", [0, 1, 300, 1500])
async def test_after_release_no_slot_is_written(rig: Rig, random: np.random.Generator, num_landed_before: int) -> None:
    """The slots go to another reservation at once, or when the sender drained, where the transport needs that."""
    source, target = rig.sender(source_pool(2000, 16 * KIB)), rig.receiver(target_pool(2000, 16 * KIB))
    first = scattered("first", 1500, 2000, random)
    second = replace(scattered("second", 1500, 2000, random, slots=first.slots[::-1]))
    first.admit(target)
    source.push("first", target.endpoint, first.copies)
    await target.log.until(lambda: len(target.landed("first")) >= num_landed_before)
    target.receiver.release("first")
    if target.receiver.is_one_sided:
        await source.abort("first")
    target.pool[list(first.slots)] = 0
    second.admit(target)
    source.push("second", target.endpoint, second.copies[:1])
    await target.until_landed("second", [0])  # whatever of the first was under way has arrived before this
    assert not target.pool[list(second.slots[1:])].any()
    source.push("second", target.endpoint, second.copies)
    await target.until_landed("second", second.blocks)
    second.assert_arrived(source.pool, target.pool)


@pytest.mark.parametrize("num_landed_before", [0, 1, 700, 1500])
async def test_an_abort_drains_at_any_moment(rig: Rig, random: np.random.Generator, num_landed_before: int) -> None:
    source, target = rig.sender(source_pool(2000, 16 * KIB)), rig.receiver(target_pool(2000, 16 * KIB))
    plan = scattered("r", 1500, 2000, random)
    plan.admit(target)
    source.push("r", target.endpoint, plan.copies)
    await target.log.until(lambda: len(target.landed("r")) >= num_landed_before)
    await source.abort("r")
    drained_at = source.log.events.index(SenderDrained("r"))
    target.receiver.release("r")
    after = scattered("after", 50, 2000, random)
    after.admit(target)
    source.push("after", target.endpoint, after.copies)
    await target.until_landed("after", after.blocks)
    assert all(event.reservation == "after" for event in source.log.events[drained_at + 1 :])


async def test_aborting_the_unknown_drains_and_twice_is_as_good_as_once(rig: Rig) -> None:
    source = rig.sender(source_pool(1, KIB))
    await source.abort("never heard of")
    source.sender.abort("never heard of")
    await source.log.until(lambda: source.log.events.count(SenderDrained("never heard of")) == 2)


async def test_an_abort_drains_although_nobody_takes_the_blocks(rig: Rig) -> None:
    source, target = rig.sender(source_pool(64, 512 * KIB)), rig.receiver(target_pool(64, 512 * KIB))
    gone = target.endpoint
    target.receiver.close()
    source.push("r", gone, [BlockPush(i, i, i) for i in range(64)])
    await source.until_begun()
    await source.abort("r")
    in_window = SenderSettings().window * 2  # frames of two blocks
    assert len(source.pushed("r")) <= (in_window if rig.transport.gathers_all else 0)


async def test_a_new_receiver_elsewhere_takes_over(rig: Rig, random: np.random.Generator) -> None:
    source, pool = rig.sender(source_pool(300, 16 * KIB)), target_pool(300, 16 * KIB)
    before, plan = rig.receiver(pool), scattered("r", 200, 300, random)
    plan.admit(before)
    source.push("r", before.endpoint, plan.copies[:50])
    await before.until_landed("r", plan.blocks[:50])
    before.receiver.close()
    source.push("r", before.endpoint, plan.copies)
    await source.abort("r")
    after, again = rig.receiver(pool), replace(plan, reservation="again")
    assert after.endpoint != before.endpoint
    again.admit(after)
    source.push("again", after.endpoint, again.copies)
    await after.until_landed("again", again.blocks)
    again.assert_arrived(source.pool, after.pool)


@pytest.mark.parametrize("endpoint", [{}, {"address": "nonsense"}])
async def test_a_push_to_a_malformed_endpoint_fails(rig: Rig, endpoint: dict[str, str]) -> None:
    source = rig.sender(source_pool(1, KIB))
    source.push("r", endpoint, [BlockPush(0, 0, 0)])
    await source.log.until(lambda: len(source.failures("r")) == 1)


async def test_bad_numbers_are_refused_at_once(rig: Rig) -> None:
    source, target = rig.sender(source_pool(4, KIB)), rig.receiver(target_pool(4, KIB))
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="source"):
            source.push("r", target.endpoint, [BlockPush(0, bad, 0)])
        with pytest.raises(ValueError, match="slots"):
            target.receiver.admit("r", 0, [bad])
    target.receiver.admit("r", 0, [1, 2])
    with pytest.raises(ValueError, match="admitted"):
        target.receiver.admit("r", 0, [3])
    with pytest.raises(ValueError, match="slot"):
        target.receiver.admit("other", 0, [2])


async def test_closing_twice_is_closing_once(rig: Rig) -> None:
    source, target = rig.sender(source_pool(64, 16 * KIB)), rig.receiver(target_pool(64, 16 * KIB))
    source.push("r", target.endpoint, [BlockPush(i, i, i) for i in range(64)])
    for _ in range(2):
        source.sender.close()
        target.receiver.close()
