"""What a sender has to send and has in flight, one situation at a time and at random, and how a push is cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import BlockPush, Pushed, SenderDrained, SenderEvent, TransferFailed
from kvrelay.handoff.transports.outbox import Copies, FrameSizes, InFlightSend, Outbox, Piece, cut, frame_blocks
from tests.thoroughness import examples

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


# -- how a push is cut into pieces -----------------------------------------------------------------------------------


NUM_BLOCKS = 1000
KIB = 1024
SIZES = FrameSizes()


def pieces_of(sources: list[int], block_bytes: int, sizes: FrameSizes = SIZES) -> list[Piece]:
    copies = [BlockPush(10 + i, source, 5000 - i) for i, source in enumerate(sources)]
    return list(cut("r", Copies.of(copies, NUM_BLOCKS), block_bytes, sizes))


def columns(copies: Copies) -> list[tuple[int, int, int]]:
    return list(zip(copies.indices.tolist(), copies.sources.tolist(), copies.slots.tolist(), strict=True))


def sources_of(pieces: list[Piece]) -> list[list[int]]:
    return [piece.copies.sources.tolist() for piece in pieces]


@given(
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=300),
    st.sampled_from([KIB, 16 * KIB, 64 * KIB, 300 * KIB, 2048 * KIB]),
)
def test_every_copy_is_in_one_piece_and_every_piece_fits(sources: list[int], block_bytes: int) -> None:
    pieces = pieces_of(sources, block_bytes)
    triples = sorted(triple for piece in pieces for triple in columns(piece.copies))
    assert triples == [(10 + i, source, 5000 - i) for i, source in enumerate(sources)]
    for piece in pieces:
        assert 1 <= len(piece.copies) <= frame_blocks(block_bytes, SIZES)
        if piece.direct:
            assert (np.diff(piece.copies.sources) == 1).all(), "a direct piece is one run of the pool"


def test_scattered_blocks_are_gathered_by_the_frame() -> None:
    pieces = pieces_of(list(range(0, 400, 2)), 16 * KIB)
    assert [len(piece.copies) for piece in pieces] == [64, 64, 64, 8]
    assert not any(piece.direct for piece in pieces)


def test_long_runs_go_directly_and_short_ones_are_gathered() -> None:
    run = list(range(100, 116))  # 256 KiB
    pieces = pieces_of([5, *reversed(run), 7, 200, 201], 16 * KIB)
    assert [(piece.direct, piece.copies.sources.tolist()) for piece in pieces] == [
        (True, run),
        (False, [5, 7, 200, 201]),
    ]


def test_a_push_that_is_one_run_goes_directly_however_short() -> None:
    [piece] = pieces_of([8, 7], KIB)
    assert piece.direct
    assert piece.copies.sources.tolist() == [7, 8]


def test_a_long_run_is_cut_into_frames() -> None:
    assert [len(piece.copies) for piece in pieces_of(list(range(150)), 16 * KIB)] == [64, 64, 22]


def test_blocks_larger_than_a_frame_go_one_by_one() -> None:
    assert sources_of(pieces_of([3, 9, 4], 2048 * KIB)) == [[3], [4], [9]]


@pytest.mark.parametrize(
    "copy", [BlockPush(0, NUM_BLOCKS, 0), BlockPush(0, -1, 0), BlockPush(-1, 0, 0), BlockPush(0, 0, 1 << 32)]
)
def test_numbers_out_of_range_are_refused(copy: BlockPush) -> None:
    with pytest.raises(ValueError, match="block"):
        Copies.of([BlockPush(0, 0, 0), copy], NUM_BLOCKS)
