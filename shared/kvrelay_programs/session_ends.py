"""Reports sessions that have ended, many in one request."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvrelay_programs.errors import EndpointError
from kvrelay_programs.loop_thread import begun_loop

DELAY_S = 0.25
"""From the first end to the request that reports it, which then delays no call of the program that begins meanwhile.
Nothing waits for it: a router passes ends on with its next regular query of the workers' status."""
MOST_AT_ONCE = 64
LAST_WAIT_S = 1.0  # that the end of the process may take for what has not been reported


class SessionEnds:
    """Collects ended sessions and reports them after a delay. What is left is reported when the process ends.

    Used on one event loop.
    """

    def __init__(self, report: Callable[[list[str]], Awaitable[None]]) -> None:
        """`report` may raise EndpointError: the end of a session is a hint."""
        self._report = report
        self._ended: list[str] = []

    def add(self, session: str) -> None:
        """Does not wait."""
        self._ended.append(session)
        if self not in _unreported:
            _unreported.add(self)
            asyncio.get_running_loop().call_later(DELAY_S, self._begin)
        elif len(self._ended) == MOST_AT_ONCE:
            self._begin()

    def _begin(self) -> None:
        task = asyncio.get_running_loop().create_task(self.flush())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    async def flush(self) -> None:
        """Reports what has been added, and waits until it is."""
        while self._ended:
            sessions, self._ended = self._ended[:MOST_AT_ONCE], self._ended[MOST_AT_ONCE:]
            with suppress(EndpointError):
                await self._report(sessions)
        _unreported.discard(self)


_unreported: set[SessionEnds] = set()
_tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
os.register_at_fork(after_in_child=_unreported.clear)  # the parent reports them


async def _flush_all() -> None:
    await asyncio.gather(*(ends.flush() for ends in _unreported))


@atexit.register
def _report_the_last() -> None:
    if (loop := begun_loop()) is not None:
        # Ends that a thread has just submitted are before this on the loop.
        with suppress(Exception):  # the interpreter is ending, and this is a hint
            asyncio.run_coroutine_threadsafe(_flush_all(), loop).result(LAST_WAIT_S)
