"""The only file that uses members of uvicorn which its documentation does not promise.

pyproject.toml caps uvicorn's version for this reason; `tests/unit/router/http/test_uvicorn_internals.py` lists every
member and fails if a new version of uvicorn lacks one.

- `Exchange` wraps the cycle of one request. Its shortcuts past ASGI's `send` and `receive` save CPU time: direct writes
  of events a third of an event; the direct report of a client's end, bodies without `receive`, and one write for head
  and first events about a tenth of a request each.
- `UvicornConnection` turns uvicorn's protocol callbacks into calls of a `ConnectionPolicy`. It also serves clients that
  uvicorn does not: offers of HTTP/2, HTTP/1.0, half-closed connections.
- `EmbeddedServer` runs inside the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvrelay_router.http.connection_policy import ConnectionPolicy
from kvrelay_router.http.wire_forms import plain_head

TICK_S = 0.1
CLOSING_TICKS = 100
"""Connections that are closing are checked every 10 s."""
LAST_REQUEST_S = 0.5
"""When the server stops, an idle connection remains open for this time, for a request that is already on its way."""
MAX_WAITING = 4
"""Maximum pipelined requests behind the running one before the connection is no longer read. While it is read, the
client's end is noticed."""


class Exchange:
    """One request and its answer."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def state(self) -> dict[str, Any]:
        """The ASGI scope's state."""
        return self._cycle.scope["state"]

    @property
    def is_http_1_0(self) -> bool:
        return self._cycle.scope["http_version"] == "1.0"

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before the answer did."""
        return self._cycle.disconnected

    @property
    def is_begun(self) -> bool:
        """True if the answer's head was written."""
        return self._cycle.response_started

    @property
    def is_answered(self) -> bool:
        return self._cycle.response_complete

    @property
    def is_received(self) -> bool:
        """True if the whole request has arrived."""
        return not self._cycle.more_body

    @property
    def can_write(self) -> bool:
        """True if the answer is not complete and its client reads."""
        cycle = self._cycle
        is_over = cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()
        return not (is_over or cycle.flow.write_paused)

    def can_write_chunks(self) -> bool:
        """False before the answer's head is written, and while the client reads so slowly that its buffer is full."""
        return self._cycle.chunked_encoding is True and not self._cycle.flow.write_paused

    def take_body(self) -> bytes | None:
        """The whole body, which `receive` then no longer returns; None if only `receive` can complete it."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def write_chunk(self, data: bytes) -> None:
        """Writes at least one byte. Drops it if the connection is lost, which `EventWriter.watch` reports."""
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def write_part(self, data: bytes) -> None:
        """Writes a part of an answer without a length, in chunks or not."""
        if self._cycle.chunked_encoding:
            self.write_chunk(data)
        else:
            self._cycle.transport.write(data)

    def write_interim(self, head: bytes) -> None:
        """Writes an interim answer (1xx), which also answers `Expect: 100-continue`."""
        self._cycle.waiting_for_100_continue = False
        self._cycle.transport.write(head)

    def lose(self) -> None:
        """Makes the application see a disconnected client."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()

    def abort(self) -> None:
        self._cycle.transport.abort()

    def read_on(self) -> None:
        """Reads the connection, which notices the client's end."""
        self._cycle.flow.resume_reading()

    def in_one_write(self) -> OneWrite:
        return OneWrite(self._cycle)

    def without_chunks(self, app: ASGIApp) -> Any:
        """`app` for a client of HTTP/1.0, which knows no chunks: the end of the connection ends the answer."""
        cycle = self._cycle

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_plain(message: Message) -> None:
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, send_plain)

        return serve


class OneWrite:
    """`with` this, everything that is sent of the answer is one `transport.write`, at the end of the block.

    It takes the transport's place in uvicorn's cycle. Nothing else writes while a request is answered.
    """

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
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()


class UvicornConnection(HttpToolsProtocol):
    """uvicorn's protocol of one client connection under the policy that `make_policy` returns."""

    def __init__(self, make_policy: Callable[[UvicornConnection], ConnectionPolicy], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.running: Exchange | None = None
        self._running_cycle: RequestResponseCycle | None = None
        self._is_last = False  # the connection ends with its last answer
        self._idle_until = 0.0  # on the loop's clock, counted from the latest answer
        self._is_head_open = False
        self._plain_head: bytes | None = None  # of a request that offers another protocol: its head without the offer
        self._fed = self._left = b""  # the data that the parser has, and the data to parse next
        self.policy = make_policy(self)

    # -- the interface for the policy ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if no request is running."""
        return self.running is None or self.running.is_answered

    def parse(self, data: bytes) -> None:
        """Feeds the parser, which calls `on_...` below."""
        while data and not self.policy.is_refused:
            self._fed, self._left = data, b""
            super().data_received(data)
            data = self._left
        self._fed = self._left = b""

    def stop_counting(self) -> None:
        """Removes this connection from those that a stopping server waits for."""
        self.connections.discard(self)

    def lose_running(self) -> None:
        """Makes the running request see a disconnected client, and drops the requests behind it."""
        self.pipeline.clear()
        if self.running is not None and not self.running.is_answered:
            self.running.lose()

    def take_over_unfinished(self) -> bool:
        """Returns True if the latest request runs, is incomplete and has no answer yet. Then its application sees a
        disconnect, and the caller answers instead."""
        running = self.running
        if running is None or self._running_cycle is not self.cycle or running.is_begun or running.is_received:
            return False
        running.lose()
        return True

    def end_after_whole_requests(self) -> None:
        """Closes the connection after the answers to all requests that have arrived whole."""
        if self.cycle.more_body and self.cycle is self._running_cycle:
            self.transport.close()
            return
        if self.cycle.more_body:
            self.pipeline.popleft()
        self._is_last = True
        if not self.pipeline and self._running_cycle is not None:
            self._running_cycle.keep_alive = False

    def rearm_keep_alive(self) -> None:
        """Data that begins no request (empty lines, the rest of a body) does not extend the keep-alive time, although
        uvicorn stops its timer for any data."""
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_at(self._idle_until, self.timeout_keep_alive_handler)

    # -- asyncio's callbacks ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.policy.connected(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn reports the end only to the latest request, but the running one may have others behind it.
        self.policy.lost()
        super().connection_lost(exc)
        # The policy refers to this connection. Without the cycle both are freed now, and not by the garbage collector.
        # Nothing calls the policy later: the parser is gone, and the server no longer counts this connection.
        del self.policy

    def data_received(self, data: bytes) -> None:
        self.policy.received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        return self.policy.half_closed()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.policy.write_paused()

    def resume_writing(self) -> None:
        self.policy.write_resumed()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server stops: this connection ends with its last answer, or soon if no request arrives."""
        self._is_last = True
        if self.is_idle and not self.policy.is_refused:
            self.loop.call_later(LAST_REQUEST_S, self._end_if_idle)
        else:
            super().shutdown()

    def _end_if_idle(self) -> None:
        if self.is_idle:
            self.transport.close()

    # -- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_head_open = True
        self.policy.request_begins()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self.policy.url_grew(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers, which follow a body in chunks, count as the head does and are dropped.
        self.policy.head_grew(len(name) + len(value) + 4)
        if self._is_head_open:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head_open = False
        self.policy.head_complete()
        if self.policy.is_refused:
            return
        version = self.parser.get_http_version()
        if version == "1.0":
            self.expect_100_continue = False  # HTTP/1.0 knows no interim answers (RFC 9110, 10.1.1)
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._plain_head = plain_head(method, self.url, version, self.headers)
            return
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_WAITING:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self.policy.body_grew(len(body))
        if not self.policy.is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.policy.body_grew(0)
        if not self.policy.is_refused and self._plain_head is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._idle_until = self.loop.time() + self.timeout_keep_alive
        self.policy.request_ended()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.policy.malformed(msg)

    def _unsupported_upgrade_warning(self) -> None:
        # The parser stops behind the head of a request that offers another protocol, and would not read its body.
        # JDK's client offers HTTP/2 with every request. No offer is accepted: the request is parsed again without it.
        parsed = sys.exception()
        if self._plain_head is not None and parsed is not None:
            self._left = self._plain_head + self._fed[parsed.args[0] :]
        self._plain_head = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running_cycle = cycle
        self.running = exchange = Exchange(cycle)
        if self._is_last and not self.pipeline:
            cycle.keep_alive = False
        self.policy.request_runs(exchange)
        super()._start_asgi_task(cycle, exchange.without_chunks(app) if exchange.is_http_1_0 else app)


class EmbeddedServer(uvicorn.Server):
    """Leaves signals to its process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_ending = asyncio.Event()

    @property
    def open_connections(self) -> list[UvicornConnection]:
        return [cast("UvicornConnection", each) for each in self.server_state.connections]

    def stop_listening(self) -> None:
        """Accepts no more connections."""
        for server in self.servers:
            server.close()

    def end(self) -> None:
        """Ends `serve` once open connections are served, or after the graceful timeout."""
        self._is_ending.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which would notice the end up to a tick later."""
        counter = 0
        while not self._is_ending.is_set():
            await self.on_tick(counter)
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._is_ending.wait()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % CLOSING_TICKS == 0:
            for each in self.open_connections:
                each.policy.check_closing()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        if state.connections or state.tasks:
            await super().shutdown(sockets)
            return
        # uvicorn would wait a tick for the connections to notice. There are none, and no new ones come.
        self.stop_listening()
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
