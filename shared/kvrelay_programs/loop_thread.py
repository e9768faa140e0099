"""The event loop on which all programs of a process make their calls, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading


def program_loop() -> asyncio.AbstractEventLoop:
    """That of this process. It runs until the process ends, so programs may run in any thread, also in one with a
    loop of its own, such as a notebook's.
    """
    with _lock:
        pid = os.getpid()
        if pid not in _loops:
            _loops.clear()  # of the parent, whose thread did not survive the fork
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="kvrelay-programs", daemon=True).start()
            _loops[pid] = loop
        return _loops[pid]


def begun_loop() -> asyncio.AbstractEventLoop | None:
    """That of this process, if a program has used it."""
    return _loops.get(os.getpid())


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
