"""The way from a transport's own thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Event = TypeVar("Event")


class LoopPort(Generic[Event]):
    """Calls `on_event` on the loop that ran when this was made. Once that loop is closed, events are dropped."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """From any thread."""
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
