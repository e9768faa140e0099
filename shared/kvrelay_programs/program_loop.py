"""The event loop on which all programs of a process make their calls, and the report of ended sessions on it, many in
one request.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvrelay_programs.errors import EndpointError


def program_loop() -> asyncio.AbstractEventLoop:
    """That of this process. It runs until the process ends, so programs may run in any thread, also in one with a
    loop of its own, such as a notebook's.
    """
    with _lock:
        pid = os.getpid()
        if pid not in _loops:
            _loops.clear()  # the parent's thread did not survive the fork
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="kvrelay-programs", daemon=True).start()
            _loops[pid] = loop
        return _loops[pid]


def begun_loop() -> asyncio.AbstractEventLoop | None:
    """That of this process, if a program has used it."""
    return _loops.get(os.getpid())


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


DELAY_S = 0.25
"""From the first end to the request that reports it, which then delays no call of the program that begins meanwhile.
Nothing waits for it: a router passes ends on with its next regular query of the workers' status."""
MOST_AT_ONCE = 64
LAST_WAIT_S = 1.0  # that the end of the process may take for what has not been reported


class SessionEnds:
    """Collects ended sessions and reports them after a delay. The rest is reported when the process ends.

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
