"""The pieces that a sender has to send and has in flight, by peer and by reservation. Pure: time is passed in.

`cut` divides a push into pieces of about one frame each. A piece whose blocks are contiguous in the pool is sent in
place. The blocks of other pieces are gathered first, which is cheaper than a frame per run while runs are short: a
frame costs about as much as copying 256 KiB.

A piece either waits in its peer's queue or is in flight: submitted to the transport, which may read the piece's memory
until it completes the send. Only a few sends per peer (the window) are in flight at once, so that an abort finds most
of the reservation's pieces still in the queue, where they can be dropped.

A peer has two states:

1. OPEN    its pieces are submitted as the window allows.
2. FAILED  its connection broke or its sends hang. Its reservations were reported as failed, and waiting pieces dropped.
           A reservation has drained only when its sends have ended nevertheless. With the last one the peer is OPEN
           again.

A reservation is unknown, active (a piece waits, is in flight or may still be on its way) or aborting: none of its
pieces waits, and the last completed send makes it unknown again and yields `SenderDrained`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrelay.handoff.transports.base import BlockPush, Pushed, SenderDrained, SenderEvent, TransferFailed
from kvrelay.handoff.transports.pool_memory import PartCopy
from kvrelay.handoff.transports.wire import Bytes, Indices


@dataclass(frozen=True, slots=True)
class FrameSizes:
    """`frame_bytes`: what a data frame should hold. `direct_bytes`: from which size on a run is sent without a copy."""

    frame_bytes: int = 1 << 20
    direct_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The copies of a push as int64 columns of shape [num_blocks]: prompt index, block at the sender, slot."""

    indices: Indices
    sources: Indices
    slots: Indices

    @staticmethod
    def of(copies: Sequence[BlockPush], num_blocks: int) -> Copies:
        """Raises ValueError for a source outside the pool, and for numbers the header cannot carry."""
        flat = np.fromiter(
            (number for copy in copies for number in (copy.index, copy.source, copy.slot)), np.int64, 3 * len(copies)
        )
        columns = np.ascontiguousarray(flat.reshape(-1, 3).T)
        if flat.size and (columns[1].min() < 0 or columns[1].max() >= num_blocks):
            raise ValueError(f"source blocks {columns[1].min()}..{columns[1].max()} in a pool of {num_blocks}")
        if flat.size and (flat.min() < 0 or flat.max() >= 1 << 32):
            raise ValueError("block indices and slots are between 0 and 2**32 - 1")
        return Copies(columns[0], columns[1], columns[2])

    def __len__(self) -> int:
        return int(self.indices.size)

    @property
    def num_runs(self) -> int:
        """The number of runs of blocks that are neighbours on both sides."""
        is_next = (np.diff(self.sources) == 1) & (np.diff(self.slots) == 1)
        return len(self) - int(np.count_nonzero(is_next))

    def take(self, rows: slice | Indices) -> Copies:
        """The copies in these rows."""
        return Copies(self.indices[rows], self.sources[rows], self.slots[rows])


@dataclass(slots=True, eq=False)
class Piece:
    """The content of one message: blocks of one reservation, in the order of the data frame."""

    reservation: str
    copies: Copies
    direct: bool
    """Whether the blocks are neighbours in the pool, so that the frame can be a view of it."""
    staging: Bytes | None = None
    """The buffer the blocks were gathered into, [num_blocks, block_bytes]; None before, and for direct pieces."""
    part: PartCopy | None = None
    """The part of each block that is sent; None: all of it."""

    def bytes_per_block(self, block_bytes: int) -> int:
        """The bytes that are sent of each block."""
        return block_bytes if self.part is None else self.part.source.size


def frame_blocks(block_bytes: int, sizes: FrameSizes) -> int:
    """Returns the largest number of blocks in a frame."""
    return max(1, sizes.frame_bytes // block_bytes)


def cut(
    reservation: str,
    copies: Copies,
    block_bytes: int,
    sizes: FrameSizes,
    *,
    in_place: bool = True,
    part: PartCopy | None = None,
) -> Iterator[Piece]:
    """All blocks of `copies`, each in one piece; every piece holds at least one block and at most a frame if it can.

    Without `in_place` no piece is direct, nor is one of a `part` that is not the sender's whole block.
    """
    step = frame_blocks(block_bytes, sizes)
    if part is not None:
        step *= block_bytes // part.source.size  # buffers for whole blocks hold this many
        in_place = in_place and part.source.is_whole
    ordered = copies.take(np.argsort(copies.sources, kind="stable"))
    starts = np.flatnonzero(np.diff(ordered.sources, prepend=ordered.sources[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ordered))
    is_direct = (lengths * block_bytes >= sizes.direct_bytes) | (lengths == len(ordered))
    is_direct &= in_place
    for start, length in zip(starts[is_direct].tolist(), lengths[is_direct].tolist(), strict=True):
        for first in range(start, start + length, step):
            last = min(first + step, start + length)
            yield Piece(reservation, ordered.take(slice(first, last)), direct=True, part=part)
    scattered = np.flatnonzero(~np.repeat(is_direct, lengths))
    for first in range(0, scattered.size, step):
        yield Piece(reservation, ordered.take(scattered[first : first + step]), direct=False, part=part)


@dataclass(slots=True, eq=False)
class PeerQueue:
    window: int
    waiting: deque[Piece] = field(default_factory=deque)
    sends: dict[int, Piece] = field(default_factory=dict)
    reservations: set[str] = field(default_factory=set)
    """Reservations with pieces for this peer, until they are aborted."""
    has_failed: bool = False
    idle_since: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.sends

    @property
    def may_submit(self) -> bool:
        return bool(self.waiting) and not self.has_failed and len(self.sends) < self.window


@dataclass(frozen=True, slots=True)
class InFlightSend:
    """A piece that the transport sends to a peer. The transport completes it by its number."""

    number: int
    peer: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Closing:
    """Connections to close now: `overdue` because sends of an aborted reservation did not end in time, `idle` because
    they were not used for long."""

    overdue: tuple[str, ...]
    idle: tuple[str, ...]


class Outbox:
    """Times are seconds of one monotonic clock. The module's docstring describes the states.

    `is_acknowledged`: a completed send has arrived. Otherwise what was sent over a connection that breaks may be lost.
    """

    def __init__(
        self, block_bytes: int, *, window: int, drain_timeout_s: float, idle_close_s: float, is_acknowledged: bool
    ) -> None:
        self._block_bytes = block_bytes
        self._window = window
        self._drain_timeout_s = drain_timeout_s
        self._idle_close_s = idle_close_s
        self._is_acknowledged = is_acknowledged
        self._peers: dict[str, PeerQueue] = {}
        self._turns: deque[str] = deque()
        self._peer_of: dict[int, str] = {}
        self._num_in_flight: Counter[str] = Counter()
        self._aborting: dict[str, float] = {}
        self._next_number = 0

    def is_aborting(self, reservation: str) -> bool:
        """Returns whether sends of an aborted reservation are still in flight."""
        return reservation in self._aborting

    def has_reservations(self, peer: str) -> bool:
        """Returns whether a reservation of this peer has not ended, so that a broken connection has to be noticed."""
        return peer in self._peers and bool(self._peers[peer].reservations)

    def push(self, peer: str, reservation: str, pieces: Iterable[Piece]) -> None:
        """Queues pieces of a reservation for a peer behind those that wait already."""
        if peer not in self._peers:
            self._peers[peer] = PeerQueue(self._window)
            self._turns.append(peer)
        self._peers[peer].reservations.add(reservation)
        self._peers[peer].waiting.extend(pieces)

    def submit(self) -> InFlightSend | None:
        """Returns the next piece to send; peers take turns. None if nothing waits or all windows are full."""
        for _ in range(len(self._turns)):
            name = self._turns[0]
            self._turns.rotate(-1)
            peer = self._peers[name]
            if peer.may_submit:
                return self._submit_to(name, peer)
        return None

    def complete(self, number: int, now: float) -> tuple[Piece, list[SenderEvent]]:
        """The transport no longer reads the memory of this send. Returns its piece, and the events to report."""
        peer, piece = self._remove(number)
        events: list[SenderEvent] = []
        if piece.reservation in self._aborting:
            events = self._drained_if_empty(piece.reservation)
        elif piece.direct:
            events = [self.pushed(piece)]
        self._settle(peer, now)
        return piece, events

    def fail(self, number: int, cause: str, now: float) -> list[SenderEvent]:
        """This send was not delivered, and its peer cannot be reached.

        Other sends to the peer are still in flight and complete one by one.
        """
        peer = self._peers[self._peer_of[number]]
        events = self._fail(peer, cause)
        peer, piece = self._remove(number)
        if piece.reservation in self._aborting:
            events += self._drained_if_empty(piece.reservation)
        self._settle(peer, now)
        return events

    def fail_peer(self, name: str, cause: str, now: float) -> list[SenderEvent]:
        """Sends to this peer hang, or its connection broke. Those in flight still have to end one by one."""
        if name not in self._peers:
            return []
        events = self._fail(self._peers[name], cause)
        self._settle(self._peers[name], now)
        return events

    def pushed(self, piece: Piece) -> Pushed:
        """The event for a piece whose blocks are no longer read."""
        num_bytes = len(piece.copies) * piece.bytes_per_block(self._block_bytes)
        return Pushed(piece.reservation, tuple(piece.copies.indices.tolist()), num_bytes)

    def abort(self, reservation: str, now: float) -> list[SenderEvent]:
        """Drops pieces that wait. `SenderDrained` follows now or with the last completed send, once for all aborts."""
        for peer in self._peers.values():
            kept = [piece for piece in peer.waiting if piece.reservation != reservation]
            if len(kept) != len(peer.waiting):
                peer.waiting = deque(kept)
            if reservation in peer.reservations:
                peer.reservations.discard(reservation)
                peer.idle_since = now
        if reservation in self._aborting:
            return []
        self._aborting[reservation] = now + self._drain_timeout_s
        return self._drained_if_empty(reservation)

    def expire(self, now: float) -> Closing:
        """Returns the connections to close now. `fail_peer` must follow for those in `overdue`; those in `idle` are
        forgotten."""
        late = {reservation for reservation, deadline in self._aborting.items() if deadline <= now}
        overdue = [
            name
            for name, peer in self._peers.items()
            if not peer.has_failed and any(piece.reservation in late for piece in peer.sends.values())
        ]
        idle = [
            name for name, peer in self._peers.items() if peer.is_idle and peer.idle_since + self._idle_close_s <= now
        ]
        for name in idle:
            del self._peers[name]
            self._turns.remove(name)
        return Closing(tuple(overdue), tuple(idle))

    def next_deadline(self) -> float | None:
        """The time of the next `expire` that will return anything, if nothing else happens."""
        drains = [
            self._aborting[piece.reservation]
            for peer in self._peers.values()
            if not peer.has_failed
            for piece in peer.sends.values()
            if piece.reservation in self._aborting
        ]
        idles = [peer.idle_since + self._idle_close_s for peer in self._peers.values() if peer.is_idle]
        return min(drains + idles, default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError if the tables contradict each other."""
        sends = [piece for peer in self._peers.values() for piece in peer.sends.values()]
        assert len(sends) == len(self._peer_of), f"{len(sends)} sends, {len(self._peer_of)} numbers"
        assert Counter(piece.reservation for piece in sends) == self._num_in_flight, "sends by reservation"
        assert sorted(self._turns) == sorted(self._peers), "every peer has its turn"
        for reservation in self._aborting:
            assert self._num_in_flight[reservation], f"{reservation} has drained, yet is aborting"
            waiting = [piece for peer in self._peers.values() for piece in peer.waiting]
            assert all(piece.reservation != reservation for piece in waiting), f"{reservation} aborted, yet waiting"

    def _fail(self, peer: PeerQueue, cause: str) -> list[SenderEvent]:
        """Once, until the last send of the peer has ended."""
        if peer.has_failed:
            return []
        pieces = (*peer.sends.values(), *peer.waiting)
        names = {piece.reservation for piece in pieces} if self._is_acknowledged else peer.reservations
        events: list[SenderEvent] = [TransferFailed(name, cause) for name in sorted(names - self._aborting.keys())]
        peer.waiting.clear()
        peer.has_failed = True
        return events

    def _submit_to(self, name: str, peer: PeerQueue) -> InFlightSend:
        piece = peer.waiting.popleft()
        number = self._next_number
        self._next_number += 1
        peer.sends[number] = piece
        self._peer_of[number] = name
        self._num_in_flight[piece.reservation] += 1
        return InFlightSend(number, name, piece)

    def _remove(self, number: int) -> tuple[PeerQueue, Piece]:
        peer = self._peers[self._peer_of.pop(number)]
        piece = peer.sends.pop(number)
        self._num_in_flight[piece.reservation] -= 1
        if not self._num_in_flight[piece.reservation]:
            del self._num_in_flight[piece.reservation]
        return peer, piece

    def _settle(self, peer: PeerQueue, now: float) -> None:
        if not peer.sends:
            peer.has_failed = False
        if peer.is_idle:
            peer.idle_since = now

    def _drained_if_empty(self, reservation: str) -> list[SenderEvent]:
        if self._num_in_flight[reservation]:
            return []
        del self._aborting[reservation]
        return [SenderDrained(reservation)]
