"""When decode requests blocks again, and when it takes a transport for broken."""

from __future__ import annotations

from typing import cast

import pytest

from kvrelay.protocol.messages import Handoff, PeerRef
from kvrelay.scheduling.sequence import Sequence
from kvrelay.transfer.base import Landed
from kvrelay_decode.overdue import (
    FIRST_RESEND_S,
    LONGEST_RESEND_S,
    ONE_SIDED_STALL_S,
    SHORTEST_RESEND_S,
    TWO_SIDED_STALL_S,
    OverdueTransfers,
    PairTimes,
)
from kvrelay_decode.receiver_events import (
    HandoffOverdue,
    HandoffReceived,
    ReservationOpened,
    TransferStalled,
)
from kvrelay_decode.receiver_handoff import MAX_SILENT_ROUNDS, ReceiverHandoff, ReceiverState
from kvrelay_decode.request import DecodeRequest

pytestmark = pytest.mark.unit

TICK_S = 0.1
PEER, OTHER = PeerRef("p", "1", "tcp://p"), PeerRef("q", "1", "tcp://q")


class Decode:
    """A decode worker's requests, ticked like those of a real one."""

    def __init__(self) -> None:
        self.overdue = OverdueTransfers(lambda transport: transport == "nixl")
        self.now = 0.0

    def request(self, peer: PeerRef = PEER, transport: str = "nixl") -> DecodeRequest:
        """Three blocks are due, and the handoff message is here."""
        handoff = ReceiverHandoff()
        handoff.handle(ReservationOpened("r", 0, 3, transport == "nixl"))
        sequence = cast("Sequence", None)  # not looked at
        request = DecodeRequest(sequence, 0.0, handoff=handoff, prefill=peer, transport=transport)
        self.hand(request, resend=0)
        return request

    def hand(self, request: DecodeRequest, resend: int) -> None:
        assert request.handoff is not None
        message = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=3, resend=resend)
        request.handoff.handle(HandoffReceived(message))
        self.overdue.handed(request, self.now, is_repeated=resend > 0)

    def land(self, request: DecodeRequest, *blocks: int) -> None:
        assert request.handoff is not None
        self.overdue.landed(request, self.now)
        request.handoff.handle(Landed("r", blocks))

    def until_event(self, request: DecodeRequest) -> tuple[float, HandoffOverdue | TransferStalled]:
        """Seconds until something has to be done, and what."""
        assert request.handoff is not None
        began = self.now
        while (event := self.overdue.check(request, self.now)) is None:
            self.now += TICK_S
            assert self.now - began < 100, "nothing has to be done"
        request.handoff.handle(event)
        return self.now - began, event


def test_before_anything_was_measured_the_time_between_requests_doubles_until_the_transport_is_broken() -> None:
    decode = Decode()
    request = decode.request()
    first, event = decode.until_event(request)
    assert isinstance(event, HandoffOverdue)
    assert first == pytest.approx(FIRST_RESEND_S, abs=2 * TICK_S)
    second, event = decode.until_event(request)
    assert isinstance(event, HandoffOverdue)
    assert second == pytest.approx(2 * FIRST_RESEND_S, abs=2 * TICK_S)
    third, event = decode.until_event(request)
    assert isinstance(event, TransferStalled)
    assert first + second + third == pytest.approx(ONE_SIDED_STALL_S, abs=2 * TICK_S)
    assert request.handoff is not None
    assert request.handoff.state is ReceiverState.QUARANTINED


def test_a_pair_whose_blocks_never_let_decode_wait_is_asked_early() -> None:
    decode = Decode()
    for _ in range(10):
        decode.land(decode.request(), 0, 1, 2)
    after, event = decode.until_event(decode.request())
    assert isinstance(event, HandoffOverdue)
    assert after == pytest.approx(SHORTEST_RESEND_S, abs=2 * TICK_S)
    other, _ = decode.until_event(decode.request(OTHER))
    assert other == pytest.approx(FIRST_RESEND_S, abs=2 * TICK_S)


def test_the_time_follows_what_a_pair_needs_and_is_forgotten_with_its_worker() -> None:
    pair = PairTimes()
    for _ in range(50):
        pair.waited(0.8)
    assert pair.resend_after_s == pytest.approx(0.8, rel=0.1)
    pair.waited(60.0)
    assert pair.resend_after_s == LONGEST_RESEND_S
    decode = Decode()
    decode.land(decode.request(), 0, 1, 2)
    decode.overdue.peer_lost(PEER)
    after, _ = decode.until_event(decode.request())
    assert after == pytest.approx(FIRST_RESEND_S, abs=2 * TICK_S)


def test_blocks_of_another_sequence_show_that_the_transport_works() -> None:
    decode = Decode()
    waiting = decode.request()
    for _ in range(100):
        decode.now += TICK_S
        decode.land(decode.request(), 0)
        assert not isinstance(decode.overdue.check(waiting, decode.now), TransferStalled)


def test_a_transport_that_copies_here_gets_longer() -> None:
    decode = Decode()
    request, event, total = decode.request(transport="zmq"), None, 0.0
    while not isinstance(event, TransferStalled):
        after, event = decode.until_event(request)
        total += after
    assert total == pytest.approx(TWO_SIDED_STALL_S, abs=2 * TICK_S)


def test_blocks_that_are_said_to_have_left_again_and_again_are_not_waited_for_ever_longer() -> None:
    decode = Decode()
    decode.land(decode.request(), 0, 1, 2)
    request = decode.request(transport="zmq")
    total = 0.0
    for number in range(1, MAX_SILENT_ROUNDS + 2):
        after, event = decode.until_event(request)
        assert isinstance(event, HandoffOverdue)
        total += after
        decode.hand(request, resend=number)
    assert request.handoff is not None
    assert request.handoff.state is ReceiverState.FREED
    assert total < (MAX_SILENT_ROUNDS + 1) * (FIRST_RESEND_S + 2 * TICK_S)


def test_time_in_which_decode_itself_stood_still_blames_nobody() -> None:
    decode = Decode()
    request = decode.request()
    decode.now += 1000.0
    assert decode.overdue.check(request, decode.now) is None


def test_what_awaits_no_blocks_is_left_alone() -> None:
    decode = Decode()
    request = decode.request()
    decode.land(request, 0, 1, 2)
    decode.now += 100.0
    assert decode.overdue.check(request, decode.now) is None
