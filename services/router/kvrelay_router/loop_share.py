"""Divides long work on the event loop into slices."""

from __future__ import annotations

import asyncio
from time import perf_counter

SLICE_S = 0.005
"""Work holds the event loop for about this time, then other callbacks run. A thread would not help: Python code in a
thread takes the GIL from the event loop for as long."""


class LoopShare:
    """One slice. Await `pause` between units of work that take a few milliseconds at most; a callback, which cannot
    wait, makes one for itself and stops when it `is_used_up`."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    @property
    def is_used_up(self) -> bool:
        """True if other callbacks should run now."""
        return perf_counter() >= self._until

    async def pause(self) -> None:
        """Lets other callbacks run if this slice is used up."""
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S
