"""The order of what happens around steps: which planning and publishing lies inside which forward.

A forward's begin and end are noted by the thread that runs it, everything else by the event loop's thread. One counter
numbers all of them, so that the order holds across threads whatever the clock's resolution.
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
    """One event of a step. `order` counts up over all events of this process; `at_s` is monotonic, in seconds."""

    order: int
    at_s: float
    step: int
    event: StepEventName


Mark = tuple[int, float]
"""A place in the order, and its time."""


class StepTrace:
    """Collects events until they are drained. `note` and `mark` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._orders = count()
        self._events: deque[StepEvent] = deque()

    def mark(self) -> Mark:
        """A place in the order for an event whose step is known only later."""
        return next(self._orders), self._clock()

    def note(self, event: StepEventName, step: int, mark: Mark | None = None) -> None:
        """An event happened now, or at the mark."""
        order, at_s = mark or self.mark()
        self._events.append(StepEvent(order, at_s, step, event))

    def drain(self) -> Iterator[StepEvent]:
        """The events so far, each once; those noted from a mark may come after others of a higher order."""
        while self._events:
            yield self._events.popleft()
