"""Remembers cancelled attempts for a while, because a cancel can arrive before the request that it cancels."""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.protocol.sequence_key import SequenceKey


class CancelledRequestCache:
    """Keys of cancelled attempts, oldest first. Entries expire after `keep_s` seconds; at most `at_most` are kept."""

    def __init__(self, keep_s: float = 120.0, at_most: int = 65536) -> None:
        self._keep_s = keep_s
        self._at_most = at_most
        self._cancelled_at: OrderedDict[SequenceKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cancelled_at)

    def add(self, key: SequenceKey, now: float) -> None:
        """Remembers that this attempt was cancelled at `now`, in monotonic seconds."""
        self._cancelled_at[key] = now
        self._cancelled_at.move_to_end(key)
        while self._cancelled_at and (
            len(self._cancelled_at) > self._at_most or now - next(iter(self._cancelled_at.values())) > self._keep_s
        ):
            self._cancelled_at.popitem(last=False)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._cancelled_at
