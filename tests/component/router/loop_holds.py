"""Measures how long an event loop is held, in CPU time of its thread, so that a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import gc
from time import thread_time
from types import TracebackType

import orjson

TICK_S = 0.001
"""A turn is seen if it is longer. Without this pause the measurement would keep a core busy."""
REFERENCE_S = 0.030
"""What `_reference` takes on the machine for which bounds are stated."""


class LoopHolds:
    """`with LoopHolds() as holds`: `holds.longest_s` is the longest turn of the running loop meanwhile.

    Everything between two turns counts: callbacks, tasks and what sockets brought. The garbage of the test's own
    libraries does not, as in a router after its start.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.num_turns = 0
        self._loop = asyncio.get_running_loop()
        self._is_open = False
        self._since = 0.0

    def __enter__(self) -> LoopHolds:
        gc.collect()
        gc.freeze()
        self._is_open = True
        self._since = thread_time()
        self._turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False

    def _turn(self) -> None:
        now = thread_time()
        self.longest_s = max(self.longest_s, now - self._since)
        self.num_turns += 1
        self._since = now
        if self._is_open:
            self._loop.call_later(TICK_S, self._turn)


def slowness() -> float:
    """How much slower this machine is than the one for which bounds are stated; 1 if it is not."""
    return max(1.0, min(_reference() for _ in range(3)) / REFERENCE_S)


def _reference() -> float:
    """Python and C code that allocates as the router does."""
    started = thread_time()
    rows = [{"index": number, "text": str(number)} for number in range(50_000)]
    assert len(orjson.loads(orjson.dumps(rows))) == len(rows)
    return thread_time() - started
