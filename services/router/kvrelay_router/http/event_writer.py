"""Writes an answer that has begun straight to its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay_router.http.half_closed import ask_client

EVENT_WRITER = "event_writer"
"""In a request's state: its `EventWriter`."""


class EventWriter:
    """Writes parts of an answer that has begun, without a task that could wait for the client to read them; and tells
    whoever serves the request when its client has gone, without one that waits for that."""

    __slots__ = ("_cycle", "_on_gone", "carries_events")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.carries_events = False  # set by whoever serves the request: its answer, once begun, is a stream of events
        self._on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once, from the event loop, when the connection is lost or because it was before; until
        `unwatch`. The request's body must have been read: the connection is read on, which is how its end shows."""
        self._on_gone = on_gone
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(self.tell_gone)
        else:
            self._cycle.flow.resume_reading()

    def unwatch(self) -> None:
        """Nobody is to be told any more."""
        self._on_gone = None

    def tell_gone(self) -> None:
        """The connection is lost."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def whole_body(self) -> bytes | None:
        """The request's body, where all of it is here already, as it mostly is; None: it must be received."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def is_ready(self) -> bool:
        """Not before the headers went out, and not while the client is so slow that its buffer is full."""
        return self._cycle.chunked_encoding is True and not self._cycle.flow.write_paused

    def write(self, events: bytes) -> None:
        """At least a byte. Nobody gets it where the client has gone, which whoever serves the request is told."""
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def ask(self, waited_s: float) -> None:
        """Finds out whether a client that ended its side that many seconds ago is still there."""
        ask_client(self._cycle, waited_s, carries_events=self.carries_events)

    def in_one_write(self) -> OneWrite:
        """What is sent of the answer within `with` goes out at its end, in one system call and as a packet of its own:
        an answer's head and what follows it. Nobody else writes to the connection while a request is answered."""
        return OneWrite(self._cycle)


class OneWrite:
    """See `EventWriter.in_one_write`. To uvicorn it is the transport."""

    __slots__ = ("_cycle", "_parts", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._parts: list[bytes] = []

    def __enter__(self) -> None:
        self._cycle.transport = cast("asyncio.Transport", self)

    def __exit__(self, *exc_info: object) -> None:
        self._cycle.transport = self._transport
        self._flush()

    def write(self, data: bytes) -> None:
        """Later."""
        self._parts.append(data)

    def close(self) -> None:
        """After what was written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection ends."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()
