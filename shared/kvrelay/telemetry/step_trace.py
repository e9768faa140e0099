"""Records the order of step events, to see which planning and publishing overlaps which forward.

The thread that runs a forward notes its begin and end, the event loop's thread everything else. One counter numbers all
events, so the order is correct across threads whatever the clock's resolution.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

import msgspec

StepEventName = Literal[
    "plan_begins", "planned", "plan_cancelled", "forward_begins", "forward_ends", "committed", "published", "failed"
]


class StepEvent(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """One event of a step. `order` increases over all events of the process; `at_s` is in monotonic seconds."""

    order: int
    at_s: float
    step: int
    event: StepEventName


Mark = tuple[int, float]
"""A position in the order, and its time."""


class StepTrace:
    """Collects events until `drain`. `note` and `mark` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._orders = count()
        self._events: deque[StepEvent] = deque()

    def mark(self) -> Mark:
        """Reserves a position for an event whose step is not known yet."""
        return next(self._orders), self._clock()

    def note(self, event: StepEventName, step: int, mark: Mark | None = None) -> None:
        """Notes an event now, or at the mark."""
        order, at_s = mark or self.mark()
        self._events.append(StepEvent(order, at_s, step, event))

    def drain(self) -> Iterator[StepEvent]:
        """Removes and yields the events so far. Events noted from a mark may follow events of a higher order."""
        while self._events:
            yield self._events.popleft()
