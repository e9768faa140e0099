"""Single steps of the sender's and the receiver's machine that a reader should know, and small parts beside them."""

from __future__ import annotations

import pytest

from kvrelay.handoff import receiver, sender
from kvrelay.handoff.receiver import ReceiverHandoff
from kvrelay.handoff.sender import FromDecode, SenderHandoff
from kvrelay.handoff.transports.base import Corrupted, Landed, TransferFailed
from kvrelay.handoff.transports.sharded import ShardedReceiver, ShardLayout
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Drained,
    Granted,
    Handoff,
    NeedDecode,
    PeerRef,
    Released,
)
from kvrelay_prefill.outgoing_handoffs import TRY_AGAIN_AFTER_S, TransportOffers
from tests.unit.handoff.test_decode_role import SilentReceiver

ROUTER = PeerRef("r", "1", "tcp://r")
FIRST, SECOND = PeerRef("d1", "1", "tcp://d1"), PeerRef("d2", "1", "tcp://d2")
HANDOFF = Handoff(reservation="", index=0, token_id=1, num_tokens=1, num_blocks=0)


def granted(reservation: str, num_blocks: int = 1) -> Granted:
    return Granted(
        reservation=reservation, first_block=0, slots=list(range(5, 5 + num_blocks)), transport="t", endpoints=[{}]
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


def test_a_failed_transfer_asks_for_another_decode_worker_at_once() -> None:
    prefill = sending(10)
    need = NeedDecode(reason="transfer failed: the connection broke", excluded=["d1"], unable=FIRST)
    assert prefill.handle(TransferFailed("r1", "the connection broke")) == [
        sender.StopPushing("r1", "t"),
        sender.SendTo(ROUTER, need),
    ]
    assert prefill.handle(TransferFailed("r1", "the connection broke")) == []


def test_a_grant_of_another_number_of_blocks_is_returned() -> None:
    prefill = SenderHandoff(ROUTER, FIRST)
    prefill.handle(sender.PrefillScheduled((10,)))
    instructions = prefill.handle(FromDecode(FIRST, granted("r1", 2)))
    bodies = [each.body for each in instructions if isinstance(each, sender.SendTo)]
    assert [type(body) for body in bodies] == [Abort, Drained, NeedDecode]


@pytest.mark.parametrize("is_one_sided", [True, False])
@pytest.mark.parametrize("event", [Corrupted("r", (1,)), receiver.BlocksOverdue("nothing came")])
def test_a_block_that_does_not_arrive_whole_ends_the_reservation(
    event: receiver.ReceiverHandoffEvent, is_one_sided: bool
) -> None:
    decode = filling(is_one_sided=is_one_sided)
    stop, released, last = decode.handle(event)
    assert stop == receiver.StopReceiving("r")
    assert isinstance(released, Released) and released.transport_failed
    assert last == (receiver.KeepBlocks() if is_one_sided else receiver.FreeBlocks(1))
    if is_one_sided:
        assert decode.handle(receiver.SlotsSafe()) == [receiver.FreeBlocks(1)]


def test_a_deferred_handoff_that_is_cancelled_is_refused() -> None:
    [refused, free] = ReceiverHandoff(is_one_sided=True).handle(Cancel(reason="draining"))
    assert free == receiver.FreeBlocks(0)
    assert type(refused).__name__ == "Refused"


# -- which transports a prefill worker offers to whom ----------------------------------------------------------------


PEER, OTHER = PeerRef("d", "1", "tcp://d"), PeerRef("e", "1", "tcp://e")


def test_what_failed_with_a_peer_is_not_offered_to_it_for_a_while() -> None:
    offers = TransportOffers(["nixl", "zmq"])
    offers.failed(PEER, "nixl", 100.0)
    assert offers.to(PEER, 100.0) == ["zmq"]
    assert offers.to(OTHER, 100.0) == ["nixl", "zmq"]
    assert offers.to(PEER, 100.0 + TRY_AGAIN_AFTER_S) == ["nixl", "zmq"]


def test_something_is_always_offered() -> None:
    offers = TransportOffers(["nixl"])
    offers.failed(PEER, "nixl", 0.0)
    assert offers.to(PEER, 0.0) == ["nixl"]


# -- which prefill workers a decode worker with stages takes kv from -------------------------------------------------


NUM_HEADS, NUM_LAYERS = 4, 3


@pytest.mark.parametrize(
    ("num_stages", "source", "reason"),
    [
        (2, ShardShape(1, 0), "0 KV heads there, 4 here"),
        (2, ShardShape(size=2, num_kv_heads=NUM_HEADS), ""),
        (2, ShardShape(size=1, num_kv_heads=NUM_HEADS, num_stages=1), ""),
        (2, ShardShape(size=2, num_kv_heads=NUM_HEADS, num_stages=3), ""),
        (2, ShardShape(size=1, num_kv_heads=NUM_HEADS, num_stages=4), "3 layers do not divide among 4 stages"),
        (2, ShardShape(size=1, num_kv_heads=8, num_stages=2), "8 KV heads there, 4 here"),
        (1, ShardShape(1, 0), ""),
        (1, ShardShape(size=2, num_kv_heads=NUM_HEADS), ""),
        (1, ShardShape(size=1, num_kv_heads=NUM_HEADS, num_stages=2), ""),
    ],
)
def test_which_workers_are_refused(num_stages: int, source: ShardShape, reason: str) -> None:
    layout = ShardLayout.of(ShardShape(1, NUM_HEADS, num_stages), NUM_LAYERS, 32)
    receiver = ShardedReceiver([SilentReceiver(False) for _ in range(num_stages)], layout)
    assert receiver.why_not_from(source) == reason
