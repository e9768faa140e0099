"""One client connection: uvicorn's, with bounds on what a client may hold of this process before it has sent a request.

Bodies are bounded where they are read (`body.py`). Here it is the number of connections, the size of a request's head
(and of what follows a body in pieces), and the time it may take to arrive; each is refused with OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvrelay_router.http.api_error import ApiError, json_response
from kvrelay_router.http.connection_limits import ConnectionLimits
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter
from kvrelay_router.http.half_closed import HalfClosedWatch
from kvrelay_router.http.wire_forms import plain_head, without_chunks

LAST_REQUEST_S = 0.5
"""When the server ends, a connection without a request stays for so long: one may be on its way, and is answered."""
LINGER_S = 1.0
"""After a refusal what comes is read and dropped for so long, or a reset would overtake the answer."""
MAX_LINGERING = 256
"""Refused connections beyond these get no answer."""
UNREAD_S = 600.0
"""A connection whose client reads nothing of a full buffer, or of what is left when it closes, for so long ends: no
deadline of a request does that."""

MAX_WAITING = 4
"""Requests that may wait behind the one that runs before the connection is not read any more: while it is read, the
client's end is seen."""


class BoundedConnection(HttpToolsProtocol):
    """See the module's text. `num_lingering` is shared by all connections of a server."""

    def __init__(self, limits: ConnectionLimits, num_lingering: list[int], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._num_lingering = num_lingering
        self._refused = False
        self._is_last = False  # what runs here, or comes next, ends the connection
        self._running: RequestResponseCycle | None = None
        self._writer: EventWriter | None = None  # of what runs
        self._header_bytes = 0  # of the present request, as far as they were parsed
        self._unparsed_bytes = 0  # that the parser keeps, because they are no whole line yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._idle_until = 0.0  # by the loop's clock; since the latest answer
        self._half_closed: HalfClosedWatch | None = None
        self._plain_head: bytes | None = None  # of a request that offers another protocol: the same without the offer
        self._fed = self._left = b""  # to the parser, and what is to be fed to it next

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses it where there are too many."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._limits.max_connections:
            self.connections.discard(self)  # the server's end does not wait for it
            self._refuse(
                f"This process has {self._limits.max_connections} connections, which is as many as it takes; try "
                f"again later",
                503,
                "too_many_connections",
                {"retry-after": "1"},
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Also tells the request that runs, where others wait behind it."""
        self._stop_waiting()
        self._stop_awaiting_reader()
        if self._half_closed is not None:
            self._half_closed.stop()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            if self._writer is not None:
                self._writer.tell_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses, unless this connection is refused. A head goes in slices, to notice what the parser only keeps."""
        slice_bytes = max(1, self._limits.max_header_bytes // 4)
        start = 0
        while start < len(data) and not self._refused and not self.transport.is_closing():
            in_head = self._head_timer is not None or self._is_idle
            piece = data[start : start + slice_bytes] if in_head and len(data) > slice_bytes else data[start:]
            start += len(piece)
            self._unparsed_bytes += len(piece)
            self._feed(piece)
            if not self._refused and self._header_bytes + self._unparsed_bytes > self._limits.max_header_bytes:
                self._refuse_head()
        self._stay_idle()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Its whole requests are answered, if it has not gone; then the connection ends.

        True where the connection is to stay open for that.
        """
        if self._is_idle or self._refused:
            return False
        self._stop_waiting()
        self._end_after_whole_requests()
        if self.transport.is_closing():
            return False
        self._half_closed = HalfClosedWatch(self.transport, self.loop, self._ask_client)
        return True

    def _ask_client(self, waited_s: float) -> None:
        if self._writer is not None:
            self._writer.ask(waited_s)

    def check_closing(self) -> None:
        """To be called now and then: one that closes waits for its client to read, which nothing else bounds."""
        if self._unread_timer is None and self.transport.is_closing():
            self._await_reader()

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """There is room again."""
        self._stop_awaiting_reader()
        super().resume_writing()

    @property
    def is_fresh(self) -> bool:
        """No request has come yet."""
        return self._running is None and not self._refused and not self.transport.is_closing()

    @property
    def _is_idle(self) -> bool:
        """Between two requests."""
        return self._running is None or self._running.response_complete

    def shutdown(self) -> None:
        """The server ends: so does this connection, with its last answer, or if no request comes."""
        self._is_last = True
        if self._is_idle and not self._refused:
            self.loop.call_later(LAST_REQUEST_S, self._end_if_idle)
        else:
            super().shutdown()

    # -- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._header_bytes = self._unparsed_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts, as all that belongs to the head."""
        self._header_bytes += len(url)
        self._unparsed_bytes = 0
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts; a header that comes after the body is counted with the others, and dropped."""
        self._header_bytes += len(name) + len(value) + 4
        self._unparsed_bytes = 0
        if self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request starts, unless its head was too large."""
        self._stop_waiting()
        self._unparsed_bytes = 0
        if self._header_bytes > self._limits.max_header_bytes:
            self._refuse_head()
        if self._refused:
            return
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it knows no interim answers (RFC 9110, 10.1.1)
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._plain_head = plain_head(method, self.url, self.parser.get_http_version(), self.headers)
        else:
            super().on_headers_complete()
            if 0 < len(self.pipeline) <= MAX_WAITING:
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Its size is the application's to judge."""
        self._unparsed_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_response_complete(self) -> None:
        """The connection is idle from now on, or the next request runs."""
        self._idle_until = self.loop.time() + self.timeout_keep_alive
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """The request is here."""
        self._unparsed_bytes = 0
        if not self._refused and self._plain_head is None:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """The parser stops behind the head of a request that offers another protocol, and would not read its body.

        JDK's client offers HTTP/2 with every request. None is taken up: the request is parsed again without the offer.
        """
        parsed = sys.exception()
        if self._plain_head is not None and parsed is not None:
            self._left = self._plain_head + self._fed[parsed.args[0] :]
        self._plain_head = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        while data and not self._refused:
            self._fed, self._left = data, b""
            super().data_received(data)
            data = self._left
        self._fed = self._left = b""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if self._is_last and not self.pipeline:
            cycle.keep_alive = False
        cycle.scope["state"][EVENT_WRITER] = self._writer = EventWriter(cycle)
        super()._start_asgi_task(cycle, without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def _stay_idle(self) -> None:
        """What came may have begun no request: empty lines, or the body of one that was answered without it. To uvicorn
        the connection is not idle then, for as long as the client likes."""
        is_waited_for = self._head_timer is not None or self.timeout_keep_alive_task is not None
        if self._is_idle and not (is_waited_for or self._refused or self.transport.is_closing()):
            self.timeout_keep_alive_task = self.loop.call_at(self._idle_until, self.timeout_keep_alive_handler)

    def _end_if_idle(self) -> None:
        if self._is_idle:
            self.transport.close()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._head_is_late)

    def _await_reader(self) -> None:
        self._stop_awaiting_reader()
        num_unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_S, self._check_reader, num_unread)

    def _check_reader(self, num_unread: int) -> None:
        """Nothing is written while the buffer is full: it shrinks, or nobody reads."""
        if self.transport.get_write_buffer_size() < num_unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _stop_awaiting_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse("The request's headers took too long to arrive", 408, None)

    def _refuse_head(self) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(f"The request's headers are larger than {limit} bytes", 431, "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(msg, 400, "invalid_http")

    def _refuse(self, message: str, status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        """Answers and ends the connection. Requests that came whole before get their answers, and this none."""
        self._refused = True
        self._stop_waiting()
        if not (self._is_idle or self._take_over_unfinished()):
            self._end_after_whole_requests()
            return
        if self._num_lingering[0] >= MAX_LINGERING:
            self.transport.close()
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = ApiError(message, status=status, code=code, error_type=kind, headers=headers)
        self.transport.write(_raw_answer(error))
        self._num_lingering[0] += 1
        self.loop.call_later(LINGER_S, self._end_lingering)

    def _take_over_unfinished(self) -> bool:
        """Whether what runs is a request without its end and without an answer: to its application the client has gone,
        and it is answered here."""
        running = self._running
        if running is None or running is not self.cycle or running.response_started or not running.more_body:
            return False
        running.disconnected = True
        running.message_event.set()
        return True

    def _end_after_whole_requests(self) -> None:
        if self.cycle.more_body and self.cycle is self._running:
            self.transport.close()
            return
        if self.cycle.more_body:
            self.pipeline.popleft()
        self._is_last = True
        if not self.pipeline and self._running is not None:
            self._running.keep_alive = False

    def _end_lingering(self) -> None:
        self._num_lingering[0] -= 1
        self.transport.close()


def make_protocol(limits: ConnectionLimits) -> Callable[..., BoundedConnection]:
    """What uvicorn calls for each connection."""
    num_lingering = [0]

    def connection(**uvicorns: Any) -> BoundedConnection:
        return BoundedConnection(limits, num_lingering, **uvicorns)

    return connection


def _raw_answer(error: ApiError) -> bytes:
    response = json_response(error.body(), error.status, {**error.headers, "connection": "close"})
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return STATUS_LINE[error.status] + head + b"\r\n" + bytes(response.body)
