"""What a sender has to send and has in flight, by peer and by reservation. No socket and no clock: time is passed in.

A piece is either waiting in its peer's queue, or lent: handed to the transport, which may read its memory until it
gives the loan back. Only a few pieces per peer are lent at a time (the window), so that an abort finds most of what it
has to drop still here.

A peer's states:

1. OPEN       its pieces are lent as the window allows.
2. RESETTING  its connection was closed because an aborted reservation's loans did not come back in time. Nothing is
              lent. Loans of other reservations that come back now may not have been sent: they are queued again (a
              block that arrives twice does no harm). With the last loan back the peer is OPEN again.

A reservation is unknown, or active (some piece waits or is lent), or ABORTING: nothing of it waits, and the last loan
that comes back makes it unknown again and yields `SenderDrained`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.transfer.base import Pushed, SenderDrained, SenderEvent, TransferFailed
from kvrelay.transfer.plan import Piece


@dataclass(slots=True, eq=False)
class _Peer:
    window: int
    waiting: deque[Piece] = field(default_factory=deque)
    loans: dict[int, Piece] = field(default_factory=dict)
    resetting: bool = False
    idle_since: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.loans

    @property
    def may_lend(self) -> bool:
        return bool(self.waiting) and not self.resetting and len(self.loans) < self.window


@dataclass(frozen=True, slots=True)
class Loan:
    """A piece on its way to a peer, and the number under which the transport gives it back."""

    number: int
    peer: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Returned:
    """A piece that came back, whether it will be sent once more, and what its owner is told."""

    piece: Piece
    queued_again: bool
    events: list[SenderEvent]


@dataclass(frozen=True, slots=True)
class Closing:
    """Connections to close now: `reset` to get loans back, `idle` because nobody used them for long."""

    reset: tuple[str, ...]
    idle: tuple[str, ...]


class Outbox:
    """See the module's text for the states. Times are in seconds, of one monotonic clock."""

    def __init__(self, block_bytes: int, *, window: int, drain_timeout_s: float, idle_close_s: float) -> None:
        self._block_bytes = block_bytes
        self._window = window
        self._drain_timeout_s = drain_timeout_s
        self._idle_close_s = idle_close_s
        self._peers: dict[str, _Peer] = {}
        self._turns: deque[str] = deque()
        self._lent_to: dict[int, str] = {}
        self._num_lent: Counter[str] = Counter()
        self._aborting: dict[str, float] = {}
        self._next_loan = 0

    def is_aborting(self, reservation: str) -> bool:
        """Whether loans of an aborted reservation are still out."""
        return reservation in self._aborting

    def push(self, peer: str, pieces: Iterable[Piece]) -> None:
        """Queues pieces for a peer, in order behind what waits already."""
        if peer not in self._peers:
            self._peers[peer] = _Peer(self._window)
            self._turns.append(peer)
        self._peers[peer].waiting.extend(pieces)

    def lend(self) -> Loan | None:
        """The next piece to send; peers take turns. None while nothing waits or all windows are full."""
        for _ in range(len(self._turns)):
            name = self._turns[0]
            self._turns.rotate(-1)
            peer = self._peers[name]
            if peer.may_lend:
                return self._lend_to(name, peer)
        return None

    def give_back(self, number: int, now: float) -> Returned:
        """The transport no longer reads this loan's memory."""
        peer, piece = self._take_back(number)
        events: list[SenderEvent] = []
        queued_again = False
        if piece.reservation in self._aborting:
            events = self._drained_if_empty(piece.reservation)
        elif peer.resetting:
            peer.waiting.appendleft(piece)
            queued_again = True
        elif piece.direct:
            events = [self.pushed(piece)]
        self._settle(peer, piece, now)
        return Returned(piece, queued_again, events)

    def lose(self, number: int, cause: str, now: float) -> list[SenderEvent]:
        """This loan came back undelivered, and its peer cannot be reached: what waits for the peer has failed with it.

        Other loans of the peer are still out, and come back one by one.
        """
        peer, piece = self._take_back(number)
        failed = dict.fromkeys([piece.reservation, *(waiting.reservation for waiting in peer.waiting)])
        peer.waiting.clear()
        events: list[SenderEvent] = [TransferFailed(name, cause) for name in failed if name not in self._aborting]
        if piece.reservation in self._aborting:
            events += self._drained_if_empty(piece.reservation)
        self._settle(peer, piece, now)
        return events

    def pushed(self, piece: Piece) -> Pushed:
        """The event that says that this piece's blocks are no longer read."""
        return Pushed(piece.reservation, tuple(piece.copies.indices.tolist()), len(piece.copies) * self._block_bytes)

    def abort(self, reservation: str, now: float) -> list[SenderEvent]:
        """Drops what waits. `SenderDrained` comes now or with the last loan, which also answers a second abort."""
        for peer in self._peers.values():
            kept = [piece for piece in peer.waiting if piece.reservation != reservation]
            if len(kept) != len(peer.waiting):
                peer.waiting = deque(kept)
                peer.idle_since = now
        if reservation in self._aborting:
            return []
        self._aborting[reservation] = now + self._drain_timeout_s
        return self._drained_if_empty(reservation)

    def expire(self, now: float) -> Closing:
        """Which connections to close at this time. Those in `reset` stay known, those in `idle` are forgotten."""
        late = {reservation for reservation, deadline in self._aborting.items() if deadline <= now}
        reset = [
            name
            for name, peer in self._peers.items()
            if not peer.resetting and any(piece.reservation in late for piece in peer.loans.values())
        ]
        for name in reset:
            self._peers[name].resetting = True
        idle = [
            name for name, peer in self._peers.items() if peer.is_idle and peer.idle_since + self._idle_close_s <= now
        ]
        for name in idle:
            del self._peers[name]
            self._turns.remove(name)
        return Closing(tuple(reset), tuple(idle))

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do, if nothing else happens."""
        drains = [
            self._aborting[piece.reservation]
            for peer in self._peers.values()
            if not peer.resetting
            for piece in peer.loans.values()
            if piece.reservation in self._aborting
        ]
        idles = [peer.idle_since + self._idle_close_s for peer in self._peers.values() if peer.is_idle]
        return min(drains + idles, default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not add up."""
        loans = [piece for peer in self._peers.values() for piece in peer.loans.values()]
        assert len(loans) == len(self._lent_to), f"{len(loans)} loans, {len(self._lent_to)} numbers"
        assert Counter(piece.reservation for piece in loans) == self._num_lent, "loans by reservation"
        assert sorted(self._turns) == sorted(self._peers), "every peer has its turn"
        for reservation in self._aborting:
            assert self._num_lent[reservation], f"{reservation} has drained, yet is aborting"
            waiting = [piece for peer in self._peers.values() for piece in peer.waiting]
            assert all(piece.reservation != reservation for piece in waiting), f"{reservation} aborted, yet waiting"

    def _lend_to(self, name: str, peer: _Peer) -> Loan:
        piece = peer.waiting.popleft()
        number = self._next_loan
        self._next_loan += 1
        peer.loans[number] = piece
        self._lent_to[number] = name
        self._num_lent[piece.reservation] += 1
        return Loan(number, name, piece)

    def _take_back(self, number: int) -> tuple[_Peer, Piece]:
        peer = self._peers[self._lent_to.pop(number)]
        piece = peer.loans.pop(number)
        self._num_lent[piece.reservation] -= 1
        return peer, piece

    def _settle(self, peer: _Peer, piece: Piece, now: float) -> None:
        if not self._num_lent[piece.reservation]:
            del self._num_lent[piece.reservation]
        if not peer.loans:
            peer.resetting = False
        if peer.is_idle:
            peer.idle_since = now

    def _drained_if_empty(self, reservation: str) -> list[SenderEvent]:
        if self._num_lent[reservation]:
            return []
        del self._aborting[reservation]
        return [SenderDrained(reservation)]
