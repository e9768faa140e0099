"""What a sender has to send and has in flight: situations one at a time, then random histories of all of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import Pushed, SenderDrained, SenderEvent, TransferFailed
from kvrelay.handoff.transports.outbox import Copies, InFlightSend, Outbox, Piece
from tests.thoroughness import examples

pytestmark = pytest.mark.unit

BLOCK_BYTES = 100
WINDOW = 2
DRAIN_S = 5.0
IDLE_S = 60.0


def piece(reservation: str, block: int, *, direct: bool = True) -> Piece:
    number = np.array([block])
    return Piece(reservation, Copies(number, number, number), direct)


@pytest.fixture
def outbox() -> Outbox:
    return new_outbox()


def new_outbox(*, is_acknowledged: bool = True) -> Outbox:
    return Outbox(
        BLOCK_BYTES, window=WINDOW, drain_timeout_s=DRAIN_S, idle_close_s=IDLE_S, is_acknowledged=is_acknowledged
    )


def push(outbox: Outbox, peer: str, *pieces: Piece) -> None:
    for each in pieces:
        outbox.push(peer, each.reservation, [each])


def submit_all(outbox: Outbox) -> list[InFlightSend]:
    sends = []
    while in_flight := outbox.submit():
        sends.append(in_flight)
    outbox.check_integrity()
    return sends


def test_no_more_than_the_window_is_lent(outbox: Outbox) -> None:
    push(outbox, "p", *[piece("r", block) for block in range(5)])
    first, second = submit_all(outbox)
    assert outbox.complete(first.number, 0.0)[1] == [Pushed("r", (0,), BLOCK_BYTES)]
    [third] = submit_all(outbox)
    assert [in_flight.piece.copies.indices.tolist() for in_flight in (first, second, third)] == [[0], [1], [2]]


def test_a_peer_whose_sends_hang_fails_every_reservation_once_and_drains_when_the_sends_end(outbox: Outbox) -> None:
    push(outbox, "p", piece("r", 0), piece("s", 0), piece("s", 1), piece("t", 0))
    push(outbox, "q", piece("u", 0))
    in_flight = {send.piece.reservation: send for send in submit_all(outbox)}
    failed = outbox.fail_peer("p", "it hangs", 0.0)
    assert failed == [TransferFailed(name, "it hangs") for name in ("r", "s", "t")]
    assert submit_all(outbox) == []
    assert outbox.abort("t", 0.0) == [SenderDrained("t")]
    assert outbox.abort("r", 0.0) == outbox.abort("s", 0.0) == []
    assert outbox.fail(in_flight["r"].number, "closed", 1.0) == [SenderDrained("r")]
    assert outbox.complete(in_flight["s"].number, 1.0)[1] == [SenderDrained("s")]
    assert outbox.complete(in_flight["u"].number, 1.0)[1] == [Pushed("u", (0,), BLOCK_BYTES)]
    push(outbox, "p", piece("v", 0))
    assert [send.piece.reservation for send in submit_all(outbox)] == ["v"]


def test_a_send_that_fails_after_its_peer_did_is_not_reported_again(outbox: Outbox) -> None:
    push(outbox, "p", piece("r", 0))
    [send] = submit_all(outbox)
    assert outbox.fail_peer("p", "it hangs", 0.0) == [TransferFailed("r", "it hangs")]
    assert outbox.fail(send.number, "closed", 0.0) == []


def test_peers_take_turns(outbox: Outbox) -> None:
    for peer in ("p", "q"):
        push(outbox, peer, *[piece("r", block) for block in range(5)])
    assert [in_flight.peer for in_flight in submit_all(outbox)] == ["p", "q", "p", "q"]


def test_a_gathered_piece_is_not_reported_again_when_it_comes_back(outbox: Outbox) -> None:
    push(outbox, "p", piece("r", 0, direct=False))
    [in_flight] = submit_all(outbox)
    assert outbox.complete(in_flight.number, 0.0)[1] == []


def test_an_abort_drops_what_waits_and_drains_with_the_last_loan(outbox: Outbox) -> None:
    push(outbox, "p", *[piece("r", block) for block in range(5)])
    push(outbox, "q", piece("r", 5))
    sends = submit_all(outbox)
    assert outbox.abort("r", 0.0) == []
    assert outbox.is_aborting("r")
    assert outbox.abort("r", 0.0) == []
    assert submit_all(outbox) == []
    for in_flight in sends[:-1]:
        assert outbox.complete(in_flight.number, 0.0)[1] == []
    assert outbox.complete(sends[-1].number, 0.0)[1] == [SenderDrained("r")]
    assert not outbox.is_aborting("r")


def test_a_lost_loan_fails_what_waits_for_its_peer_and_nobody_else(outbox: Outbox) -> None:
    for peer, reservations in (("p", "aabbc"), ("q", "d")):
        push(outbox, peer, *[piece(name, block) for block, name in enumerate(reservations)])
    first, other, second = submit_all(outbox)
    assert outbox.fail(first.number, "gone", 0.0) == [TransferFailed(name, "gone") for name in "abc"]
    assert submit_all(outbox) == []
    assert outbox.abort("a", 0.0) == []
    assert outbox.fail(second.number, "gone", 0.0) == [SenderDrained("a")]
    assert outbox.complete(other.number, 0.0)[1] == [Pushed("d", (0,), BLOCK_BYTES)]
    outbox.check_integrity()


def test_aborting_what_is_not_lent_drains_at_once(outbox: Outbox) -> None:
    assert outbox.abort("unknown", 0.0) == [SenderDrained("unknown")]
    push(outbox, "p", piece("r", 0))
    assert outbox.abort("r", 0.0) == [SenderDrained("r")]
    assert submit_all(outbox) == []


def test_a_peer_that_does_not_end_aborted_sends_in_time_is_overdue(outbox: Outbox) -> None:
    push(outbox, "p", piece("doomed", 0), piece("kept", 1), piece("kept", 2))
    sends = {in_flight.piece.copies.indices.item(): in_flight.number for in_flight in submit_all(outbox)}
    outbox.abort("doomed", 10.0)
    assert outbox.next_deadline() == 15.0
    assert outbox.expire(14.9).overdue == ()
    assert outbox.expire(15.0).overdue == ("p",)
    assert outbox.fail_peer("p", "late", 15.0) == [TransferFailed("kept", "late")]
    assert outbox.expire(16.0).overdue == (), "once is enough"
    assert submit_all(outbox) == [], "nothing goes to a peer whose sends have not ended"
    assert outbox.complete(sends[0], 16.0)[1] == [SenderDrained("doomed")]
    outbox.complete(sends[1], 16.0)
    push(outbox, "p", piece("later", 3))
    assert [in_flight.piece.reservation for in_flight in submit_all(outbox)] == ["later"]


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_what_was_sent_over_a_connection_that_breaks_is_lost_unless_sends_are_acknowledged(
    is_acknowledged: bool,
) -> None:
    outbox = new_outbox(is_acknowledged=is_acknowledged)
    push(outbox, "p", piece("sent", 0), piece("ended", 1), piece("waits", 2))
    for in_flight in submit_all(outbox):
        outbox.complete(in_flight.number, 0.0)
    outbox.abort("ended", 0.0)
    failed = [event.reservation for event in outbox.fail_peer("p", "it broke", 0.0)]
    assert failed == (["waits"] if is_acknowledged else ["sent", "waits"])
    assert outbox.fail_peer("unknown", "it broke", 0.0) == []


def test_a_peer_without_work_is_forgotten_after_a_while(outbox: Outbox) -> None:
    push(outbox, "p", piece("r", 0))
    [in_flight] = submit_all(outbox)
    assert outbox.next_deadline() is None
    outbox.complete(in_flight.number, 10.0)
    assert outbox.next_deadline() == 70.0
    assert outbox.expire(69.0).idle == ()
    assert outbox.expire(70.0).idle == ("p",)
    assert outbox.next_deadline() is None


RESERVATIONS = st.sampled_from("abc")
PEERS = st.sampled_from("pq")
STEPS = st.one_of(
    st.tuples(st.just("push"), RESERVATIONS, PEERS, st.booleans()),
    st.tuples(st.just("abort"), RESERVATIONS),
    st.tuples(st.just("submit")),
    st.tuples(st.just("complete"), st.integers(0, 100)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, DRAIN_S, IDLE_S])),
)


class History:
    """An outbox, and what a sender's thread would do with it."""

    def __init__(self) -> None:
        self.outbox = new_outbox()
        self.now = 0.0
        self.sends: list[InFlightSend] = []
        self.pushed: Counter[int] = Counter()
        self.num_drained: Counter[str] = Counter()
        self.num_aborted: Counter[str] = Counter()
        self.dropped: set[int] = set()
        self.block_of: dict[int, str] = {}

    def tell(self, events: list[SenderEvent]) -> None:
        for event in events:
            if isinstance(event, SenderDrained):
                self.num_drained[event.reservation] += 1
                submitted = [in_flight.piece.reservation for in_flight in self.sends]
                assert event.reservation not in submitted, "drained means that nothing is submitted"
            elif isinstance(event, Pushed):
                self.pushed.update(event.blocks)
            else:
                self.dropped |= {block for block, owner in self.block_of.items() if owner == event.reservation}

    def step(self, kind: str, *arguments: object) -> None:
        match kind, arguments:
            case "push", (str(reservation), str(peer), bool(direct)):
                if not self.outbox.is_aborting(reservation):
                    block = len(self.block_of)
                    self.block_of[block] = reservation
                    push(self.outbox, peer, piece(reservation, block, direct=direct))
            case "abort", (str(reservation),):
                self.num_aborted[reservation] += not self.outbox.is_aborting(reservation)
                self.dropped |= {block for block, owner in self.block_of.items() if owner == reservation}
                self.tell(self.outbox.abort(reservation, self.now))
            case "submit", ():
                self.submit()
            case "complete", (int(number),):
                self.complete(number)
            case "wait", (float(seconds),):
                self.now += seconds
                for peer in self.outbox.expire(self.now).overdue:
                    self.tell(self.outbox.fail_peer(peer, "late", self.now))
        self.outbox.check_integrity()

    def submit(self) -> bool:
        in_flight = self.outbox.submit()
        if in_flight is None:
            return False
        assert not self.outbox.is_aborting(in_flight.piece.reservation)
        if not in_flight.piece.direct and in_flight.piece.staging is None:
            in_flight.piece.staging = np.zeros((1, BLOCK_BYTES), np.uint8)
            self.tell([self.outbox.pushed(in_flight.piece)])
        self.sends.append(in_flight)
        return True

    def complete(self, number: int) -> None:
        if self.sends:
            in_flight = self.sends.pop(number % len(self.sends))
            self.tell(self.outbox.complete(in_flight.number, self.now)[1])

    def settle(self) -> None:
        """The transport works again: everything is sent and comes back."""
        while self.submit() or self.sends:
            self.complete(0)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEPS, max_size=80))
def test_every_block_is_pushed_once_or_aborted_and_every_abort_drains_once(steps: list[tuple[object, ...]]) -> None:
    history = History()
    for kind, *arguments in steps:
        history.step(str(kind), *arguments)
    history.settle()
    assert history.num_drained == history.num_aborted
    assert all(count == 1 for count in history.pushed.values())
    assert set(history.block_of) - history.dropped <= set(history.pushed)
