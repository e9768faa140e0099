"""What holds for every transfer, whatever it is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrelay.handoff.transports.base import BlockPush, SenderDrained
from kvrelay.handoff.transports.zmq_sender import SenderSettings
from tests.component.transfer.rig import Plan, Rig, scattered, send_all
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


@pytest.mark.parametrize(("first_source", "first_slot"), [(0, 0), (7, 40), (100, 1)])
async def test_a_run_of_neighbours_arrives(rig: Rig, first_source: int, first_slot: int) -> None:
    source, target = rig.sender(source_pool(300, 16 * KIB)), rig.receiver(target_pool(300, 16 * KIB))
    plan = Plan("r", 0, tuple(range(first_source, first_source + 200)), tuple(range(first_slot, first_slot + 200)))
    await send_all(source, target, plan)
    await source.until_pushed("r", plan.blocks)
    plan.assert_arrived(source.pool, target.pool)


async def test_neighbours_may_swap_places(rig: Rig) -> None:
    """The slots' first and last alone look like a run."""
    source, target = rig.sender(source_pool(8, 16 * KIB)), rig.receiver(target_pool(8, 16 * KIB))
    plan = Plan("r", 0, (1, 2, 3, 4), (2, 4, 3, 5))
    await send_all(source, target, plan)
    plan.assert_arrived(source.pool, target.pool)


async def test_order_and_cut_of_pushes_do_not_matter(rig: Rig, random: np.random.Generator) -> None:
    source, target = rig.sender(source_pool(500, 4 * KIB)), rig.receiver(target_pool(500, 4 * KIB))
    plan = scattered("r", 400, 500, random)
    plan.admit(target)
    shuffled = [plan.copies[i] for i in random.permutation(400)]
    for first in range(0, 400, 23):
        source.push("r", target.endpoint, shuffled[first : first + 23])
    await target.until_landed("r", plan.blocks)
    plan.assert_arrived(source.pool, target.pool)


async def test_one_block_may_go_to_several_slots(rig: Rig) -> None:
    source, target = rig.sender(source_pool(4, 16 * KIB)), rig.receiver(target_pool(8, 16 * KIB))
    plan = Plan("r", 0, (2, 2, 2, 3), (7, 0, 5, 1))
    await send_all(source, target, plan)
    plan.assert_arrived(source.pool, target.pool)


async def test_interleaved_reservations_of_several_senders_do_not_mix(rig: Rig, random: np.random.Generator) -> None:
    sources = [rig.sender(source_pool(400, 16 * KIB, seed)) for seed in range(3)]
    target = rig.receiver(target_pool(1200, 16 * KIB))
    slots = random.permutation(1200)
    plans = [
        scattered(f"r{i}", 100, 400, random, first_block=i, slots=slots[100 * i : 100 * i + 100].tolist())
        for i in range(9)
    ]
    for plan in plans:
        plan.admit(target)
    for first in range(0, 100, 10):
        for i, plan in enumerate(plans):
            sources[i % 3].push(plan.reservation, target.endpoint, plan.copies[first : first + 10])
    for i, plan in enumerate(plans):
        await target.until_landed(plan.reservation, plan.blocks)
        plan.assert_arrived(sources[i % 3].pool, target.pool)
    target.assert_untouched(slots[900:].tolist())


async def test_one_sender_serves_several_receivers(rig: Rig, random: np.random.Generator) -> None:
    source = rig.sender(source_pool(300, 16 * KIB))
    targets = [rig.receiver(target_pool(300, 16 * KIB)) for _ in range(3)]
    plans = [scattered(f"r{i}", 150, 300, random) for i in range(3)]
    for target, plan in zip(targets, plans, strict=True):
        plan.admit(target)
        source.push(plan.reservation, target.endpoint, plan.copies)
    for target, plan in zip(targets, plans, strict=True):
        await target.until_landed(plan.reservation, plan.blocks)
        plan.assert_arrived(source.pool, target.pool)


async def test_a_repeated_push_is_harmless(rig: Rig, random: np.random.Generator) -> None:
    source, target = rig.sender(source_pool(200, 16 * KIB)), rig.receiver(target_pool(200, 16 * KIB))
    plan, marker = scattered("r", 100, 100, random), Plan("marker", 0, (0,), (199,))
    plan.admit(target)
    marker.admit(target)
    source.push("r", target.endpoint, plan.copies[:60])
    await target.until_landed("r", plan.blocks[:60])
    source.push("r", target.endpoint, plan.copies)
    source.push("r", target.endpoint, plan.copies[20:30])
    await target.until_landed("r", plan.blocks)
    await source.until_pushed("r", [*plan.blocks, *plan.blocks[:60], *plan.blocks[20:30]])
    source.push("marker", target.endpoint, marker.copies)
    await target.until_landed("marker", [0])
    assert target.landed("r") == list(plan.blocks), "each block is reported once"
    plan.assert_arrived(source.pool, target.pool)


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


async def test_an_abort_leaves_other_reservations_alone(rig: Rig, random: np.random.Generator) -> None:
    source, target = rig.sender(source_pool(2000, 16 * KIB)), rig.receiver(target_pool(2000, 16 * KIB))
    slots = random.permutation(2000).tolist()
    doomed = scattered("doomed", 1000, 2000, random, slots=slots[:1000])
    kept = scattered("kept", 1000, 2000, random, slots=slots[1000:])
    doomed.admit(target)
    kept.admit(target)
    for first in range(0, 1000, 50):
        source.push("doomed", target.endpoint, doomed.copies[first : first + 50])
        source.push("kept", target.endpoint, kept.copies[first : first + 50])
    await source.abort("doomed")
    await target.until_landed("kept", kept.blocks)
    kept.assert_arrived(source.pool, target.pool)


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


@pytest.mark.parametrize("endpoint", [{}, {"address": "nonsense"}, {"address": "tcp://host:0"}])
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
