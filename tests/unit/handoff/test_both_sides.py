"""Sender and receiver machines joined by ordered links and a transport that lands blocks in any order, loses some and
corrupts some.

What a write does to the memory, what the receiver hears of it, and what the sender hears of it are events of their own.

Random walks over everything that may happen; at the end of each, nobody waits and nobody holds anything.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import FirstToken, Granted, Handoff, PeerRef
from kvrelay.state_machine import IllegalEvent
from kvrelay.transfer.base import BlockPush, Corrupted, Landed, Pushed, SenderDrained
from kvrelay_decode import receiver_events as decode
from kvrelay_decode import receiver_handoff
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState
from kvrelay_prefill import sender_events as prefill
from kvrelay_prefill.sender_handoff import ReservationState, SenderHandoff, SenderState
from tests.thoroughness import examples
from tests.unit.handoff.walks import World


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.sampled_from([0, 1, 3, 40]), st.integers(1, 3))
def test_every_walk_ends_with_one_owner_or_none_and_nothing_held(
    seed: int, one_sided: bool, calm: bool, most_faults: int, num_ranks: int
) -> None:
    world = World(random.Random(seed), one_sided, most_faults, num_ranks)
    world.walk(calm)
    assert world.sender.state is SenderState.RELEASED
    assert world.blocks_released
    running = [r for r in world.receivers.values() if r.committed]
    for receiver in world.receivers.values():
        assert receiver.machine is None or receiver.machine.state is ReceiverState.RUNNING
        assert receiver.slots_held == bool(receiver.committed)
    ended_without_decode = world.cancelled or world.first_ended or world.failed
    lost = not all(r.alive for r in world.receivers.values())
    assert len(running) == (0 if ended_without_decode else 1) or (lost and not running)


def test_an_illegal_event_changes_nothing() -> None:
    sender = SenderHandoff(PeerRef("d", "1", "tcp://d"))
    with pytest.raises(IllegalEvent):
        sender.handle(prefill.BlocksComputed(1))
    with pytest.raises(IllegalEvent):
        sender.handle(prefill.PrefillFinished(FirstToken(index=0, token_id=1)))
    assert (sender.state, sender.reservation_state) == (SenderState.QUEUED, ReservationState.NONE)
    receiver = ReceiverHandoff()
    receiver.handle(decode.ReservationOpened("r", 0, 2, needs_quarantine=False))
    with pytest.raises(IllegalEvent):
        receiver.handle(decode.ReservationOpened("s", 0, 2, needs_quarantine=False))
    assert (receiver.reservation, receiver.num_missing) == ("r", 2)


def test_blocks_that_an_earlier_grant_still_reads_outlive_the_commit_of_the_next() -> None:
    first, second = PeerRef("d1", "1", "tcp://d1"), PeerRef("d2", "1", "tcp://d2")
    sender = SenderHandoff(first)
    sender.handle(prefill.PrefillScheduled((10,)))
    sender.handle(prefill.ReservationGranted(first, granted("r1")))
    sender.handle(prefill.PrefillFinished(FirstToken(index=0, token_id=1)))
    assert prefill.AbortTransfer("r1", "t") in sender.handle(prefill.ReservationReleased(first, "r1", "full"))
    sender.handle(prefill.DecodeReassigned(second))
    sender.handle(prefill.ReservationGranted(second, granted("r2")))
    assert sender.handle(prefill.HandoffCommitted("r2")) == []
    assert sender.state is SenderState.DRAINING
    assert sender.handle(SenderDrained("r1")) == [prefill.SendDrained(first, "r1"), prefill.ReleaseBlocks()]


def test_decode_that_lost_us_and_asks_again_is_told_when_its_reservation_has_drained() -> None:
    first = PeerRef("d1", "1", "tcp://d1")
    sender = SenderHandoff(first)
    sender.handle(prefill.PrefillScheduled((10,)))
    sender.handle(prefill.ReservationGranted(first, granted("r1")))
    sender.handle(prefill.BlocksComputed(1))
    sender.handle(prefill.DecodeLost(first, "silent"))
    assert sender.handle(prefill.ReservationReleased(first, "r1", "asks again")) == []
    assert sender.handle(SenderDrained("r1")) == [prefill.SendDrained(first, "r1")]
    assert sender.handle(prefill.ReservationReleased(first, "r1", "asks again")) == [prefill.SendDrained(first, "r1")]


def filling(*, one_sided: bool = False) -> ReceiverHandoff:
    receiver = ReceiverHandoff()
    receiver.handle(decode.ReservationOpened("r", 0, 3, needs_quarantine=one_sided))
    receiver.handle(Landed("r", (0,)))
    receiver.handle(decode.HandoffReceived(Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3)))
    return receiver


def test_a_block_that_comes_corrupted_is_asked_for_at_once_and_not_for_ever() -> None:
    receiver = filling()
    for number in range(1, receiver_handoff.MAX_CORRUPTIONS + 1):
        asked = receiver.handle(Corrupted("r", (0, 2)))  # 0 has landed: what comes of it does not matter any more
        assert asked == [decode.SendResend("r", (2,), number, corrupted=True)]
    cause = f"block 2 came corrupted {receiver_handoff.MAX_CORRUPTIONS + 1} times"
    assert receiver.handle(Corrupted("r", (2,))) == [
        decode.StopReceiving("r"),
        decode.SendReleased("r", cause, transport_failed=True),
        decode.FreeBlocks(1),
    ]


def test_blocks_that_never_come_are_given_up_and_any_that_lands_starts_the_count_again() -> None:
    receiver = filling()
    for _ in range(receiver_handoff.MAX_SILENT_ROUNDS):
        receiver.handle(decode.HandoffOverdue())
    receiver.handle(Landed("r", (1,)))
    for _ in range(receiver_handoff.MAX_SILENT_ROUNDS):
        assert isinstance(receiver.handle(decode.HandoffOverdue())[0], decode.SendResend)
    told = receiver.handle(decode.HandoffOverdue())[1]
    assert isinstance(told, decode.SendReleased)
    assert told.transport_failed and "1 blocks did not come" in told.reason


def test_a_corrupted_block_that_is_still_in_flight_is_pushed_again_when_it_has_left() -> None:
    first = PeerRef("d1", "1", "tcp://d1")
    sender = SenderHandoff(first)
    sender.handle(prefill.PrefillScheduled((10, 11)))
    message = Granted(reservation="r", first_block=0, slots=[5, 6], transport="t", endpoint={})
    sender.handle(prefill.ReservationGranted(first, message))
    sender.handle(prefill.BlocksComputed(1))
    assert sender.handle(prefill.ResendRequested("r", (0, 1), 1, corrupted=True)) == []  # 1 was never pushed
    [again] = sender.handle(Pushed("r", (0,), 1))
    assert again == prefill.PushBlocks("r", "t", {}, (BlockPush(0, 10, 5),))
    assert prefill.SendHandoff(first, "r", 2, resend=0) in sender.handle(
        prefill.PrefillFinished(FirstToken(index=0, token_id=1))
    )
    assert sender.handle(Pushed("r", (1,), 1)) == []
    assert sender.handle(Pushed("r", (0,), 1)) == [prefill.SendHandoff(first, "r", 2, resend=1)]


def test_where_writes_are_one_sided_the_answer_to_the_last_question_is_awaited() -> None:
    receiver = filling(one_sided=True)
    receiver.handle(Corrupted("r", (1,)))
    assert receiver.handle(Landed("r", (1, 2))) == []
    message = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3, resend=1)
    assert receiver.handle(decode.HandoffReceived(message)) == [decode.RecheckBlocks("r", (1,))]
    assert decode.Commit(message) in receiver.handle(Landed("r", (1,)))


def test_a_landed_block_that_a_repeated_write_has_damaged_is_found_and_asked_for_again() -> None:
    receiver = filling(one_sided=True)
    assert receiver.handle(decode.HandoffOverdue()) == [decode.SendResend("r", (1, 2), 1, corrupted=False)]
    assert receiver.handle(Landed("r", (1, 2))) == []  # the first writes were only late
    answer = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3, resend=1)
    assert receiver.handle(decode.HandoffReceived(answer)) == [decode.RecheckBlocks("r", (1, 2))]
    assert receiver.handle(Landed("r", (1,))) == []
    assert receiver.handle(Corrupted("r", (2,))) == [decode.SendResend("r", (2,), 2, corrupted=True)]
    assert receiver.handle(Landed("r", (2,))) == []
    second = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3, resend=2)
    assert receiver.handle(decode.HandoffReceived(second)) == [decode.RecheckBlocks("r", (2,))]
    assert decode.Commit(second) in receiver.handle(Landed("r", (2,)))


def test_repeated_blocks_of_a_handoff_that_ended_are_not_taken_for_whole() -> None:
    receiver = filling(one_sided=True)
    receiver.handle(decode.HandoffOverdue())
    receiver.handle(Landed("r", (1, 2)))
    receiver.handle(decode.ReceiveCancelled("client gone"))
    assert receiver.handle(decode.WritesDrained()) == [decode.FreeBlocks(1)]


def granted(reservation: str) -> Granted:
    return Granted(reservation=reservation, first_block=0, slots=[5], transport="t", endpoint={})


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_missing_block_is_asked_for_again_and_a_late_double_awaited_where_it_cannot_be_refused(
    one_sided: bool,
) -> None:
    """A late write over a one-sided transport would land after its double, when the slot may have another owner."""
    receiver = filling(one_sided=one_sided)
    assert receiver.handle(decode.HandoffOverdue()) == [decode.SendResend("r", (1, 2), 1, corrupted=False)]
    committed = [type(each) for each in receiver.handle(Landed("r", (1, 2)))]
    assert committed == ([] if one_sided else [decode.StopReceiving, decode.Commit])


def test_pushes_go_to_all_ranks_of_decode() -> None:
    decode_worker = PeerRef("d1", "1", "tcp://d1")
    sender = SenderHandoff(decode_worker)
    sender.handle(prefill.PrefillScheduled((10,)))
    message = Granted(
        reservation="r",
        first_block=0,
        slots=[5],
        transport="t",
        endpoint={"address": "a"},
        rank_endpoints=[{"address": "b"}],
        num_stages=2,
    )
    sender.handle(prefill.ReservationGranted(decode_worker, message))
    [push] = sender.handle(prefill.BlocksComputed(1))
    assert push == prefill.PushBlocks(
        "r", "t", {"address": "a"}, (BlockPush(0, 10, 5),), rank_endpoints=({"address": "b"},), num_stages=2
    )
