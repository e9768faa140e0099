"""Single steps of the sender's and the receiver's machine that a reader should know; the search visits all of them."""

from __future__ import annotations

import pytest

from kvrelay.handoff import receiver, sender
from kvrelay.handoff.receiver import ReceiverHandoff
from kvrelay.handoff.sender import FromDecode, ReservationState, SenderHandoff, SenderState
from kvrelay.handoff.transports.base import BlockPush, Corrupted, Landed, SenderDrained, TransferFailed
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Committed,
    Drained,
    Granted,
    Handoff,
    NeedDecode,
    PeerRef,
    Reassign,
    Released,
)
from kvrelay.state_machine import IllegalEvent

ROUTER = PeerRef("r", "1", "tcp://r")
FIRST, SECOND = PeerRef("d1", "1", "tcp://d1"), PeerRef("d2", "1", "tcp://d2")
HANDOFF = Handoff(reservation="", index=0, token_id=1, num_tokens=1, num_blocks=0)


def granted(reservation: str, num_blocks: int = 1) -> Granted:
    return Granted(
        reservation=reservation, first_block=0, slots=list(range(5, 5 + num_blocks)), transport="t", endpoint={}
    )


def sending(*blocks: int) -> SenderHandoff:
    """Computed, and granted by the first decode worker."""
    made = SenderHandoff(ROUTER, FIRST)
    made.handle(sender.PrefillScheduled(blocks))
    made.handle(FromDecode(FIRST, granted("r1", len(blocks))))
    made.handle(sender.PrefillFinished(HANDOFF))
    return made


def filling(*, is_one_sided: bool = False) -> ReceiverHandoff:
    """One of three blocks has landed, and the message is here."""
    made = ReceiverHandoff(is_one_sided=is_one_sided)
    made.handle(granted("r", 3))
    made.handle(Landed("r", (0,)))
    made.handle(Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3))
    return made


def test_an_illegal_event_changes_nothing() -> None:
    prefill = SenderHandoff(ROUTER, FIRST)
    with pytest.raises(IllegalEvent):
        prefill.handle(sender.BlocksComputed(1))
    with pytest.raises(IllegalEvent):
        prefill.handle(sender.PrefillFinished(HANDOFF))
    assert (prefill.state, prefill.reservation_state) == (SenderState.QUEUED, ReservationState.NONE)
    decode = filling()
    with pytest.raises(IllegalEvent):
        decode.handle(granted("s", 3))
    assert (decode.reservation, decode.num_received) == ("r", 1)


def test_blocks_that_an_earlier_grant_still_reads_outlive_the_commit_of_the_next() -> None:
    prefill = sending(10)
    released = FromDecode(FIRST, Released(reservation="r1", reason="full"))
    assert sender.StopPushing("r1", "t") in prefill.handle(released)
    prefill.handle(Reassign(decode=SECOND))
    prefill.handle(FromDecode(SECOND, granted("r2")))
    assert prefill.handle(FromDecode(SECOND, Committed(reservation="r2"))) == []
    assert prefill.state is SenderState.DRAINING
    drained = sender.Send(FIRST, Drained(reservation="r1"))
    assert prefill.handle(SenderDrained("r1")) == [drained, sender.ReleaseBlocks()]
    assert prefill.handle(released) == [drained], "decode lost us, and asks again"


def test_a_failed_transfer_asks_for_another_decode_worker_at_once() -> None:
    prefill = sending(10)
    need = NeedDecode(reason="transfer failed: the connection broke", excluded=["d1"], lacks=FIRST)
    assert prefill.handle(TransferFailed("r1", "the connection broke")) == [
        sender.StopPushing("r1", "t"),
        sender.Send(ROUTER, need),
    ]
    assert prefill.handle(TransferFailed("r1", "the connection broke")) == []


def test_blocks_are_pushed_once_for_each_reservation_when_they_are_computed() -> None:
    prefill = SenderHandoff(ROUTER, FIRST)
    prefill.handle(sender.PrefillScheduled((10, 11, 12)))
    prefill.handle(sender.BlocksComputed(2))
    grant = Granted(reservation="r1", first_block=1, slots=[5, 6], transport="t", endpoint={})
    assert prefill.handle(FromDecode(FIRST, grant)) == [sender.PushBlocks(grant, (BlockPush(1, 11, 5),))]
    assert prefill.handle(sender.BlocksComputed(2)) == []
    push, handoff = prefill.handle(sender.PrefillFinished(HANDOFF))
    assert push == sender.PushBlocks(grant, (BlockPush(2, 12, 6),))
    assert isinstance(handoff, sender.Send) and isinstance(handoff.body, Handoff)
    assert (handoff.body.reservation, handoff.body.num_blocks) == ("r1", 2)


def test_a_grant_of_another_number_of_blocks_is_returned() -> None:
    prefill = SenderHandoff(ROUTER, FIRST)
    prefill.handle(sender.PrefillScheduled((10,)))
    instructions = prefill.handle(FromDecode(FIRST, granted("r1", 2)))
    bodies = [each.body for each in instructions if isinstance(each, sender.Send)]
    assert [type(body) for body in bodies] == [Abort, Drained, NeedDecode]


@pytest.mark.parametrize("is_one_sided", [True, False])
@pytest.mark.parametrize("event", [Corrupted("r", (1,)), receiver.BlocksOverdue("nothing came")])
def test_a_block_that_does_not_arrive_whole_ends_the_reservation(
    event: receiver.ReceiverEvent, is_one_sided: bool
) -> None:
    decode = filling(is_one_sided=is_one_sided)
    stop, released, last = decode.handle(event)
    assert stop == receiver.StopReceiving("r")
    assert isinstance(released, Released) and released.transport_failed
    assert last == (receiver.KeepBlocks() if is_one_sided else receiver.FreeBlocks(1))
    if is_one_sided:
        assert decode.handle(Drained(reservation="r")) == [receiver.FreeBlocks(1)]


def test_a_deferred_handoff_that_is_cancelled_is_refused() -> None:
    [refused, free] = ReceiverHandoff(is_one_sided=True).handle(Cancel(reason="draining"))
    assert free == receiver.FreeBlocks(0)
    assert type(refused).__name__ == "Refused"
