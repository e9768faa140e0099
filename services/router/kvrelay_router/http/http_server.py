"""Serves an ASGI application on a socket inside the caller's event loop, by uvicorn.

`BoundedConnection` bounds what a client may hold before and between its requests: the number of connections, the size
of a request's head (and of the trailers behind a body in chunks), the time until a head has arrived, and the time for
which a client reads nothing. A connection that breaks a bound is answered with OpenAI's error object and closed. Bodies
are bounded where they are read (`body.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrelay.process import OTHER_FILES, allow_open_files
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.http.error_response import error_response

log = logging.getLogger(__name__)

UNREAD_S = 600.0
"""A client that reads nothing of its pending answer for this time loses its connection. No deadline of a request bounds
this."""
LINGER_S = 1.0
"""A refused connection stays open for this time: a reset would overtake the answer."""
MAX_LINGERING = 256
"""Further connections beyond the limit are closed at once, without an answer."""

_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one process."""

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 60.0


def allowed_connections(wanted: int, num_peer_files: int = 0) -> int:
    """Raises the limit of open files if it is too low for `wanted` connections besides the files for peers.

    Returns how many connections it then allows.
    """
    reserved = OTHER_FILES + num_peer_files
    limit = allow_open_files(wanted + reserved)
    if limit >= wanted + reserved:
        return wanted
    allowed = max(16, limit - reserved)
    log.warning("the limit of open files, %d, allows only %d of max_connections = %d", limit, allowed, wanted)
    return allowed


class HeadTooLarge(Exception):
    """Ends the parser. The connection has been refused."""


class BoundedConnection(HttpToolsProtocol):
    """Overrides the callbacks of asyncio and httptools, which are their interfaces, and `on_response_complete` and
    `send_400_response` of uvicorn's class."""

    def __init__(self, limits: ConnectionLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._num_unanswered = 0  # requests whose heads have arrived
        self._receiving: Literal["", "head", "body"] = ""  # the part of a request that arrives
        self._is_refused = False
        self._head_bytes = 0  # bytes received since the last whole request, head or part of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # -- asyncio's callbacks ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        num_further = len(self.connections) - self._limits.max_connections
        if num_further > MAX_LINGERING:
            transport.abort()
        elif num_further > 0:
            self._refuse(
                f"This process has {self._limits.max_connections} connections, which is as many as it takes; try "
                f"again later",
                503,
                "too_many_connections",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes += len(data)
        super().data_received(data if self._receiving == "body" else _without_offer(data))
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_head()
        elif not self._num_unanswered and self._head_timer is None:
            # Data that begins no request (empty lines, the rest of a body) has stopped uvicorn's timer of idle
            # connections.
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

    # -- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._receiving = "head"
        self._await_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving == "head":  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            self._refuse_head()
            raise HeadTooLarge
        self._receiving = "body"
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        self._num_unanswered += 1

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = ""
        self._head_bytes = 0
        super().on_message_complete()

    # -- uvicorn's ----------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._num_unanswered -= 1
        super().on_response_complete()
        if self._is_refused and self._num_unanswered <= (self._receiving == "body"):
            self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_reader()  # also of a connection that closes, which waits for its client to read the rest

    def send_400_response(self, msg: str) -> None:
        self._refuse(msg, 400, "invalid_http")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        if self._receiving == "head":
            self._refuse("The request's headers took too long to arrive", 408, None)
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(f"The request's headers are larger than {limit} bytes", 431, "headers_too_large")

    def _refuse(self, message: str, status: int, code: str | None) -> None:
        """Answers and ends the connection, for the first reason that is given. If requests that have arrived wait for
        answers, it ends with these."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_head_timer()
        if self._num_unanswered > (self._receiving == "body") or self.transport.is_closing():
            return
        self.transport.write(_refusal(message, status, code))
        self.loop.call_later(LINGER_S, self.transport.close)

    def _watch_reader(self) -> None:
        """Nothing is written from now on, so the buffer shrinks if the client reads anything."""
        self._stop_reader_timer()
        num_unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(UNREAD_S, self._check_reader, num_unread)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _check_reader(self, num_unread: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        if num_left >= num_unread:
            self.transport.abort()
        elif num_left:
            self._watch_reader()


def _without_offer(data: bytes) -> bytes:
    """A request's head without the offer to go on with another protocol. JDK's client offers HTTP/2 with every request,
    and the parser would not read the body behind an offer."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"", head) + end + rest


def _refusal(message: str, status: int, code: str | None) -> bytes:
    headers = {"connection": "close"} | ({"retry-after": "1"} if status == 503 else {})
    response = error_response(ApiError(message, status=status, code=code, headers=headers), "")
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode()) + head + b"\r\n" + bytes(response.body)


BACKLOG = 2048
POLL_S = 0.005
DEFAULT_LIMITS = ConnectionLimits()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield


class HttpServer:
    """A running server. `port` is the bound port even if the configured one is 0."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")

    async def started(self) -> None:
        """Returns once the server accepts connections. Raises the error that stopped it."""
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it was ready")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> None:
        """Returns when the server has ended."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Accepts no more connections, serves open ones until the graceful timeout, then cancels the rest."""
        self._server.should_exit = True
        await self._task


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    graceful_timeout_s: float = 30.0,
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> HttpServer:
    """Serves the listening socket until `stop`, which closes it."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", functools.partial(BoundedConnection, limits)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(graceful_timeout_s)),
        backlog=BACKLOG,
    )
    server = HttpServer(config, listener)
    await server.started()
    return server


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a listening socket whose connections inherit TCP_NODELAY. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
