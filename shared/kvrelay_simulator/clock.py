"""Virtual time. Events run in order of time, events of equal time in order of creation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock in seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.now_s

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Schedules a call at this time, or now if it has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Schedules a call after a delay."""
        self.at(self.now_s + delay_s, event)

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, event = heapq.heappop(self._events)
        event()
        return True
