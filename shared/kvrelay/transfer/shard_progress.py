"""What the transfers of several ranks amount to for the handoff of a sequence. Pure, no I/O.

A worker's ranks hold the KV of different heads of the same blocks, so a block has left when all of its parts have left
all ranks, and has landed when it has on all ranks. The failure of one rank's transfer is the failure of the handoff,
as it is that of a worker with one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.transfer.base import Corrupted, Landed, Pushed, ReceiverEvent, SenderDrained, SenderEvent, TransferFailed


@dataclass(slots=True)
class _Pushes:
    parts_left: Counter[int] = field(default_factory=Counter)  # pushed parts per block that have not left
    num_bytes: int = 0  # sent parts of blocks that were not reported
    ranks_left: int | None = None  # that have not drained; None: not aborted
    has_failed: bool = False


class PushProgress:
    """Joins the events of `num_ranks` senders. An event of a reservation that is not known here comes through."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pushes: dict[str, _Pushes] = {}

    def started(self, reservation: str, blocks: Iterable[int], num_parts: int) -> None:
        """Each of the blocks is pushed in `num_parts` parts."""
        pushes = self._pushes.setdefault(reservation, _Pushes())
        pushes.parts_left.update(dict.fromkeys(blocks, num_parts))

    def aborted(self, reservation: str) -> bool:
        """Returns whether all ranks must now abort. False: an earlier abort has not drained yet."""
        pushes = self._pushes.setdefault(reservation, _Pushes())
        if pushes.ranks_left is not None:
            return False
        pushes.ranks_left = self._num_ranks
        return True

    def handle(self, event: SenderEvent) -> SenderEvent | None:
        """Returns the event for the handoff, if one follows from that of a rank."""
        pushes = self._pushes.get(event.reservation)
        if pushes is None:
            return event
        match event:
            case Pushed():
                return self._pushed(pushes, event)
            case TransferFailed():
                is_first, pushes.has_failed = not pushes.has_failed, True
                return event if is_first else None
            case SenderDrained():
                return self._drained(pushes, event)

    def _pushed(self, pushes: _Pushes, event: Pushed) -> Pushed | None:
        pushes.num_bytes += event.num_bytes
        pushes.parts_left.subtract(event.blocks)
        left = tuple(block for block in event.blocks if pushes.parts_left[block] <= 0)
        for block in left:
            del pushes.parts_left[block]
        if not left:
            return None
        num_bytes, pushes.num_bytes = pushes.num_bytes, 0
        if not pushes.parts_left and pushes.ranks_left is None and not pushes.has_failed:
            del self._pushes[event.reservation]
        return Pushed(event.reservation, left, num_bytes)

    def _drained(self, pushes: _Pushes, event: SenderDrained) -> SenderDrained | None:
        if pushes.ranks_left is None:
            return None  # answers an abort of an earlier time
        pushes.ranks_left -= 1
        if pushes.ranks_left > 0:
            return None
        del self._pushes[event.reservation]
        return event


class LandingProgress:
    """Joins the events of `num_ranks` receivers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_of: dict[str, dict[int, set[int]]] = {}  # ranks where a block landed, by reservation

    def admitted(self, reservation: str, blocks: Iterable[int]) -> None:
        """The blocks may land on all ranks."""
        self._ranks_of[reservation] = {block: set() for block in blocks}

    def released(self, reservation: str) -> None:
        """Nothing more is said of this reservation."""
        self._ranks_of.pop(reservation, None)

    def handle(self, rank: int, event: ReceiverEvent) -> ReceiverEvent | None:
        """Returns the event for the handoff, if one follows from that of a rank."""
        ranks_of = self._ranks_of.get(event.reservation)
        if ranks_of is None:
            return None
        known = [block for block in event.blocks if block in ranks_of]
        if isinstance(event, Corrupted):
            for block in known:
                ranks_of[block].discard(rank)
            return Corrupted(event.reservation, tuple(known)) if known else None
        for block in known:
            ranks_of[block].add(rank)
        whole = tuple(block for block in known if len(ranks_of[block]) == self._num_ranks)
        return Landed(event.reservation, whole) if whole else None
