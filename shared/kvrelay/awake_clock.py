"""Time during which this process ran."""

from __future__ import annotations

MAX_GAP_S = 0.5


class AwakeClock:
    """A clock that stops while its process is suspended. That time must not count as silence of a peer.

    It must be read often: a longer gap between two calls counts as `MAX_GAP_S`.
    """

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._last_read = 0.0

    def read(self, now: float) -> float:
        """Returns seconds, never less than before. `now` is of a monotonic clock; one older than an earlier `now` reads
        the same as that one."""
        if now > self._last_read:
            self._elapsed_s += min(now - self._last_read, MAX_GAP_S)
            self._last_read = now
        return self._elapsed_s
