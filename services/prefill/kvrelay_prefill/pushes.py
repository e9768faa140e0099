"""Transfers under way: whose reservation each belongs to, how many blocks have not ended, how long any had not."""

from __future__ import annotations

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.transfer.base import Pushed, SenderEvent
from kvrelay.worker.load_report import PushClock


class Pushes:
    """The books of all pushes of a worker, by reservation. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._keys: dict[str, SequenceKey] = {}
        self._num_open: dict[str, int] = {}  # blocks under way
        self._clock = PushClock()

    def know(self, reservation: str, key: SequenceKey) -> None:
        """The reservation's transfers are to be reported to this sequence, until it is forgotten."""
        self._keys[reservation] = key

    def forget(self, reservation: str) -> None:
        """Nobody is told of the reservation's transfers any more; what is under way still counts."""
        self._keys.pop(reservation, None)

    def key_of(self, reservation: str) -> SequenceKey | None:
        """Whom to tell."""
        return self._keys.get(reservation)

    def begun(self, reservation: str, num_blocks: int, now: float) -> None:
        """So many blocks were given to the transport."""
        self._num_open[reservation] = self._num_open.get(reservation, 0) + num_blocks
        self._clock.begun(num_blocks, now)

    def ended(self, event: SenderEvent, now: float) -> None:
        """Some left, or the reservation ended in any way: then none of its blocks is under way any more."""
        num_open = self._num_open.pop(event.reservation, 0)
        num_ended = min(num_open, len(event.blocks)) if isinstance(event, Pushed) else num_open
        if num_ended < num_open:
            self._num_open[event.reservation] = num_open - num_ended
        self._clock.ended(num_ended, now)

    def busy_s(self, now: float) -> float:
        """How long anything was under way, since the start."""
        return self._clock.busy_s(now)
