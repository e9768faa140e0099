"""Writes the events of a stream straight to their connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay_router.http.half_closed import ask_client
from kvrelay_router.http.uvicorn_internals import Exchange, OneWrite
from kvrelay_router.pending_memory import BodyBytes

EVENT_WRITER = "event_writer"
"""The key of a request's `EventWriter` in its ASGI state."""


class EventWriter:
    """Writes parts of an answer from any callback, without a task that awaits `send`; and reports the client's end to
    the task that serves the request, without a second task that awaits `receive`."""

    __slots__ = ("_exchange", "_on_gone", "body", "carries_events", "is_ready", "write")

    def __init__(self, exchange: Exchange, body: BodyBytes) -> None:
        self._exchange = exchange
        self.body = body
        # Bound here, because both are called for every event.
        self.is_ready = exchange.can_write_chunks
        self.write = exchange.write_chunk
        self.carries_events = False  # set by the endpoint: the answer, once begun, is a stream of events
        self._on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once, from the event loop, if the connection is or gets lost before `unwatch`.

        The request's body must have been read: the connection is read on, which is how its end is noticed.
        """
        self._on_gone = on_gone
        if self._exchange.is_lost:
            asyncio.get_running_loop().call_soon(self.report_gone)
        else:
            self._exchange.read_on()

    def unwatch(self) -> None:
        self._on_gone = None

    def report_gone(self) -> None:
        """The connection is lost."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def whole_body(self) -> bytes | None:
        """The request's body if all of it has arrived, which is the usual case; None: it must be received."""
        return self._exchange.take_body()

    def ask(self, waited_s: float) -> None:
        """Finds out whether a client that ended its side `waited_s` ago is still there."""
        ask_client(self._exchange, waited_s, carries_events=self.carries_events)

    def in_one_write(self) -> OneWrite:
        """`with` this, an answer's head and the events behind it go out in one system call and one packet."""
        return self._exchange.in_one_write()
