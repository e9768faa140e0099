"""What a sender has to send and has in flight: situations one at a time, then random histories of all of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.transfer.base import Pushed, SenderDrained, SenderEvent, TransferFailed
from kvrelay.transfer.outbox import Loan, Outbox
from kvrelay.transfer.plan import Copies, Piece
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


def new_outbox() -> Outbox:
    return Outbox(BLOCK_BYTES, window=WINDOW, drain_timeout_s=DRAIN_S, idle_close_s=IDLE_S)


def lend_all(outbox: Outbox) -> list[Loan]:
    loans = []
    while loan := outbox.lend():
        loans.append(loan)
    outbox.check_integrity()
    return loans


def test_no_more_than_the_window_is_lent(outbox: Outbox) -> None:
    outbox.push("p", [piece("r", block) for block in range(5)])
    first, second = lend_all(outbox)
    assert outbox.give_back(first.number, 0.0).events == [Pushed("r", (0,), BLOCK_BYTES)]
    [third] = lend_all(outbox)
    assert [loan.piece.copies.indices.tolist() for loan in (first, second, third)] == [[0], [1], [2]]


def test_peers_take_turns(outbox: Outbox) -> None:
    for peer in ("p", "q"):
        outbox.push(peer, [piece("r", block) for block in range(5)])
    assert [loan.peer for loan in lend_all(outbox)] == ["p", "q", "p", "q"]


def test_a_gathered_piece_is_not_reported_again_when_it_comes_back(outbox: Outbox) -> None:
    outbox.push("p", [piece("r", 0, direct=False)])
    [loan] = lend_all(outbox)
    assert outbox.give_back(loan.number, 0.0).events == []


def test_an_abort_drops_what_waits_and_drains_with_the_last_loan(outbox: Outbox) -> None:
    outbox.push("p", [piece("r", block) for block in range(5)])
    outbox.push("q", [piece("r", 5)])
    loans = lend_all(outbox)
    assert outbox.abort("r", 0.0) == []
    assert outbox.is_aborting("r")
    assert outbox.abort("r", 0.0) == []
    assert lend_all(outbox) == []
    for loan in loans[:-1]:
        assert outbox.give_back(loan.number, 0.0).events == []
    assert outbox.give_back(loans[-1].number, 0.0).events == [SenderDrained("r")]
    assert not outbox.is_aborting("r")


def test_a_lost_loan_fails_what_waits_for_its_peer_and_nobody_else(outbox: Outbox) -> None:
    for peer, reservations in (("p", "aabbc"), ("q", "d")):
        outbox.push(peer, [piece(name, block) for block, name in enumerate(reservations)])
    first, other, second = lend_all(outbox)
    assert outbox.lose(first.number, "gone", 0.0) == [TransferFailed(name, "gone") for name in "abc"]
    assert lend_all(outbox) == []
    assert outbox.abort("a", 0.0) == []
    assert outbox.lose(second.number, "gone", 0.0) == [SenderDrained("a")]
    assert outbox.give_back(other.number, 0.0).events == [Pushed("d", (0,), BLOCK_BYTES)]
    outbox.check_integrity()


def test_aborting_what_is_not_lent_drains_at_once(outbox: Outbox) -> None:
    assert outbox.abort("unknown", 0.0) == [SenderDrained("unknown")]
    outbox.push("p", [piece("r", 0)])
    assert outbox.abort("r", 0.0) == [SenderDrained("r")]
    assert lend_all(outbox) == []


def test_a_late_abort_resets_its_peer_and_sends_the_others_pieces_again(outbox: Outbox) -> None:
    outbox.push("p", [piece("doomed", 0), piece("kept", 1), piece("kept", 2)])
    outbox.push("q", [piece("kept", 3)])
    loans = {loan.piece.copies.indices.item(): loan.number for loan in lend_all(outbox)}
    outbox.abort("doomed", 10.0)
    assert outbox.next_deadline() == 15.0
    assert outbox.expire(14.9).reset == ()
    assert outbox.expire(15.0).reset == ("p",)
    assert outbox.expire(16.0).reset == (), "once is enough"
    assert lend_all(outbox) == [], "nothing goes to a peer that is being reset"
    returned = outbox.give_back(loans[1], 16.0)
    assert (returned.queued_again, returned.events) == (True, [])
    assert outbox.give_back(loans[0], 16.0).events == [SenderDrained("doomed")]
    assert [loan.piece.copies.indices.item() for loan in lend_all(outbox)] == [1, 2]
    assert outbox.give_back(loans[3], 16.0).events == [Pushed("kept", (3,), BLOCK_BYTES)]


def test_a_peer_without_work_is_forgotten_after_a_while(outbox: Outbox) -> None:
    outbox.push("p", [piece("r", 0)])
    [loan] = lend_all(outbox)
    assert outbox.next_deadline() is None
    outbox.give_back(loan.number, 10.0)
    assert outbox.next_deadline() == 70.0
    assert outbox.expire(69.0).idle == ()
    assert outbox.expire(70.0).idle == ("p",)
    assert outbox.next_deadline() is None


RESERVATIONS = st.sampled_from("abc")
PEERS = st.sampled_from("pq")
STEPS = st.one_of(
    st.tuples(st.just("push"), RESERVATIONS, PEERS, st.booleans()),
    st.tuples(st.just("abort"), RESERVATIONS),
    st.tuples(st.just("lend")),
    st.tuples(st.just("give back"), st.integers(0, 100)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, DRAIN_S, IDLE_S])),
)


class History:
    """An outbox, and what a sender's thread would do with it."""

    def __init__(self) -> None:
        self.outbox = new_outbox()
        self.now = 0.0
        self.loans: list[Loan] = []
        self.pushed: Counter[int] = Counter()
        self.num_drained: Counter[str] = Counter()
        self.num_aborted: Counter[str] = Counter()
        self.dropped: set[int] = set()
        self.block_of: dict[int, str] = {}

    def tell(self, events: list[SenderEvent]) -> None:
        for event in events:
            if isinstance(event, SenderDrained):
                self.num_drained[event.reservation] += 1
                lent = [loan.piece.reservation for loan in self.loans]
                assert event.reservation not in lent, "drained means that nothing is lent"
            elif isinstance(event, Pushed):
                self.pushed.update(event.blocks)

    def step(self, kind: str, *arguments: object) -> None:
        match kind, arguments:
            case "push", (str(reservation), str(peer), bool(direct)):
                if not self.outbox.is_aborting(reservation):
                    block = len(self.block_of)
                    self.block_of[block] = reservation
                    self.outbox.push(peer, [piece(reservation, block, direct=direct)])
            case "abort", (str(reservation),):
                self.num_aborted[reservation] += not self.outbox.is_aborting(reservation)
                self.dropped |= {block for block, owner in self.block_of.items() if owner == reservation}
                self.tell(self.outbox.abort(reservation, self.now))
            case "lend", ():
                self.lend()
            case "give back", (int(number),):
                self.give_back(number)
            case "wait", (float(seconds),):
                self.now += seconds
                self.outbox.expire(self.now)
        self.outbox.check_integrity()

    def lend(self) -> bool:
        loan = self.outbox.lend()
        if loan is None:
            return False
        assert not self.outbox.is_aborting(loan.piece.reservation)
        if not loan.piece.direct and loan.piece.staging is None:
            loan.piece.staging = np.zeros((1, BLOCK_BYTES), np.uint8)
            self.tell([self.outbox.pushed(loan.piece)])
        self.loans.append(loan)
        return True

    def give_back(self, number: int) -> None:
        if self.loans:
            loan = self.loans.pop(number % len(self.loans))
            self.tell(self.outbox.give_back(loan.number, self.now).events)

    def settle(self) -> None:
        """The transport works again: everything is sent and comes back."""
        while self.lend() or self.loans:
            self.give_back(0)


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
