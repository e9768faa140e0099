"""Bounds on what one client connection may hold of this process before it has sent a request.

Bounded are the number of connections, the size of a request's head (and of the trailers behind a body in chunks), and
the time until the head has arrived. A connection that breaks a bound is answered with OpenAI's error object and closed.
Bodies are bounded where they are read (`body.py`), and all of a process together here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.connection_limits import ConnectionLimits
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter
from kvrelay_router.http.half_closed import HalfClosedWatch
from kvrelay_router.http.reader_watch import ReaderWatch
from kvrelay_router.http.refusal import Refusals
from kvrelay_router.http.uvicorn_internals import Exchange, UvicornConnection
from kvrelay_router.pending_memory import CODE, RETRY_AFTER, BodyBytes, PendingMemory


class BoundedConnection:
    """The policy of one connection (`ConnectionPolicy`). `refusals` is shared by all connections of a server."""

    def __init__(
        self, limits: ConnectionLimits, refusals: Refusals, memory: PendingMemory, wire: UvicornConnection
    ) -> None:
        self._limits = limits
        self._refusals = refusals
        self._wire = wire
        self._memory = memory
        self._body = BodyBytes(memory)
        self._is_refused = False
        self._writer: EventWriter | None = None  # belongs to the running request
        self._url = b""  # the current request's target, as far as it has arrived
        self._header_bytes = 0  # parsed header bytes of the current request
        self._unparsed_bytes = 0  # bytes of an incomplete line, which the parser keeps
        self._head_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosedWatch | None = None
        self.reader: ReaderWatch

    @property
    def is_refused(self) -> bool:
        return self._is_refused

    # -- the connection -----------------------------------------------------------------------------------------------

    def connected(self, num_connections: int) -> None:
        self.reader = ReaderWatch(self._wire.transport, self._wire.loop)
        self._await_head()
        if num_connections > self._limits.max_connections:
            self._wire.stop_counting()
            self._refuse(
                f"This process has {self._limits.max_connections} connections, which is as many as it takes; try "
                f"again later",
                503,
                "too_many_connections",
                {"retry-after": "1"},
            )

    def lost(self) -> None:
        self._stop_head_timer()
        self.reader.stop()
        self._body.release()
        if self._half_closed is not None:
            self._half_closed.stop()
            self._half_closed = None  # it refers to this policy
        was_running = not self._wire.is_idle
        self._wire.lose_running()
        if was_running and self._writer is not None:
            self._writer.report_gone()

    def received(self, data: bytes) -> None:
        # The parser keeps an incomplete line without a limit and without a callback. So data within a head is parsed in
        # slices, and the bytes without a callback are counted after each slice.
        max_bytes = self._limits.max_header_bytes
        slice_bytes = max(1, max_bytes // 4)
        start = 0
        while start < len(data) and not self._is_refused and not self._wire.transport.is_closing():
            in_head = self._head_timer is not None or self._wire.is_idle
            part = data[start : start + slice_bytes] if in_head and len(data) > slice_bytes else data[start:]
            start += len(part)
            self._unparsed_bytes += len(part)
            self._wire.parse(part)
            if not self._is_refused and self._header_bytes + self._unparsed_bytes > max_bytes:
                self._refuse_head()
        is_waiting_for_data = self._wire.is_idle and self._head_timer is None
        if is_waiting_for_data and not self._is_refused and not self._wire.transport.is_closing():
            self._wire.rearm_keep_alive()

    def half_closed(self) -> bool:
        """Complete requests are answered if the client is still there. Returns True if the connection remains open."""
        if self._wire.is_idle or self._is_refused:
            return False
        self._stop_head_timer()
        self._wire.end_after_whole_requests()
        if self._wire.transport.is_closing():
            return False
        self._half_closed = HalfClosedWatch(self._wire.transport, self._wire.loop, self._ask_client)
        return True

    def _ask_client(self, waited_s: float) -> None:
        if self._writer is not None:
            self._writer.ask(waited_s)

    def check_closing(self) -> None:
        """A connection that closes waits for its client to read the rest, which nothing else bounds."""
        if self._wire.transport.is_closing() and not self.reader.is_running:
            self.reader.start()

    def write_paused(self) -> None:
        self.reader.start()

    def write_resumed(self) -> None:
        self.reader.stop()

    # -- its requests -------------------------------------------------------------------------------------------------

    def request_begins(self) -> None:
        self._header_bytes = self._unparsed_bytes = 0
        self._url = b""
        self._await_head()

    def url_grew(self, part: bytes) -> None:
        self._url += part
        self.head_grew(len(part))

    def head_grew(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        self._unparsed_bytes = 0

    def head_complete(self) -> None:
        self._stop_head_timer()
        self._unparsed_bytes = 0
        if self._header_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def body_grew(self, num_bytes: int) -> None:
        self._unparsed_bytes = 0
        if num_bytes and not self._body.grow(num_bytes):
            self._refuse(self._memory.refusal, 503, CODE, RETRY_AFTER)

    def request_runs(self, exchange: Exchange) -> None:
        exchange.state[EVENT_WRITER] = self._writer = EventWriter(exchange, self._body)

    def request_ended(self) -> None:
        self._body.release()

    def malformed(self, message: str) -> None:
        self._refuse(message, 400, "invalid_http")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self._wire.loop.call_later(self._limits.header_timeout_s, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._refuse("The request's headers took too long to arrive", 408, None)

    def _refuse_head(self) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(f"The request's headers are larger than {limit} bytes", 431, "headers_too_large")

    def _refuse(self, message: str, status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        """Answers and ends the connection. If earlier requests arrived whole, they are answered instead of this one."""
        self._is_refused = True
        self._stop_head_timer()
        if not (self._wire.is_idle or self._wire.take_over_unfinished()):
            self._wire.end_after_whole_requests()
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = ApiError(message, status=status, code=code, error_type=kind, headers=headers)
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._refusals.answer(self._wire.transport, self._wire.loop, error, path)


def make_protocol(limits: ConnectionLimits, memory: PendingMemory) -> Callable[..., UvicornConnection]:
    """The factory that uvicorn calls for each connection."""
    refusals = Refusals()

    def policy(wire: UvicornConnection) -> BoundedConnection:
        return BoundedConnection(limits, refusals, memory, wire)

    def connection(**uvicorns: Any) -> UvicornConnection:
        return UvicornConnection(policy, **uvicorns)

    return connection
