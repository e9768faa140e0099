"""The way from a transport's own thread to the event loop, and the thread's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Event = TypeVar("Event")

END_TIMEOUT_S = 5.0


def ended_in_time(thread: Thread) -> bool:
    """Waits for a thread that was told to end, but not for ever: a call into a library may hold it. Such a thread is
    left behind, with all that it may still touch; it goes with the process."""
    thread.join(END_TIMEOUT_S)
    if thread.is_alive():
        log.error("the thread %s did not end within %g s and is left behind", thread.name, END_TIMEOUT_S)
    return not thread.is_alive()


class LoopPort(Generic[Event]):
    """Calls `on_event` on the loop that ran when this was made. Once that loop is closed, events are dropped."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Passes the event to the event loop. Callable from any thread."""
        self._call(self._on_event, event)

    def report_crash(self, thread_name: str, error: Exception) -> None:
        """Hands the end of a thread that should not have ended to the loop's exception handler, marked as fatal."""
        context = {"message": f"the thread {thread_name} ended", "exception": error, "fatal": True}
        self._call(self._loop.call_exception_handler, context)

    def _call(
        self, callback: Callable[[Event], None] | Callable[[dict[str, object]], object], argument: object
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            log.debug("dropped an event, its loop is closed: %s", argument)
