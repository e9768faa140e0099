"""Cancels that overtook what they cancel: remembered for a while, so that the late request is not started."""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.engine.batch import SequenceKey


class Tombstones:
    """Keys of cancelled attempts, with an expiry in seconds and a bound on their number."""

    def __init__(self, keep_s: float = 120.0, at_most: int = 65536) -> None:
        self._keep_s = keep_s
        self._at_most = at_most
        self._buried: OrderedDict[SequenceKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buried)

    def bury(self, key: SequenceKey, now: float) -> None:
        """Remembers that this attempt was cancelled."""
        self._buried[key] = now
        self._buried.move_to_end(key)
        while self._buried and (
            len(self._buried) > self._at_most or now - next(iter(self._buried.values())) > self._keep_s
        ):
            self._buried.popitem(last=False)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._buried
