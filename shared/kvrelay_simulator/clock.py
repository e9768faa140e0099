"""Virtual time: events in the order of their times, equal ones in the order in which they were made."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        """The present."""
        return self.now_s

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Lets something happen then, or now if that has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Lets something happen in a while."""
        self.at(self.now_s + delay_s, event)

    def step(self) -> bool:
        """Lets the next event happen; False where there is none."""
        if not self._events:
            return False
        self.now_s, _, event = heapq.heappop(self._events)
        event()
        return True
