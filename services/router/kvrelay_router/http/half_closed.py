"""A client that has ended its side of a connection: it may wait for its answer, or it has gone.

Both send the same FIN, and a half-closed connection says nothing of a client's interest (RFC 9112, 6.3). What tells
them apart is a write: the system of a client that has gone answers it with a reset, which the next write finds. So the
client is asked, by bytes that mean nothing: an interim answer before its answer (a client has to understand one or
more, RFC 9110, 15.2), a comment between the events of a stream. Clients of HTTP/1.0 know no interim answers, and there
are proxies among them, whose own clients leave: they are taken for gone unless the answer begins at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvrelay_router.http.uvicorn_internals import Exchange

FIRST_ASK_S = 0.05
"""Answers that come at once come without being preceded by a question. Later ones come after twice the time, ..."""
MAX_ASK_S = 5.0
"""... up to this: a connection that is passed on byte by byte may need several for the reset to come back."""
UNASKED_S = 0.5
"""A client of HTTP/1.0 that ended its side before its answer began has gone after so long."""
SILENT_S = 30
"""A client whose system acknowledges nothing of what it is sent, nor resets it, has gone after so long (Linux)."""

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"


class HalfClosedWatch:
    """Calls `ask` from the event loop again and again, until `stop`; with the seconds since this was made."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, ask: Callable[[float], None]
    ) -> None:
        self._loop = loop
        self._ask = ask
        self._began = loop.time()
        self._interval_s = FIRST_ASK_S
        self._timer = loop.call_later(FIRST_ASK_S, self._ask_again)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # it was reset just now, which the next write finds
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)

    def _ask_again(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._ask_again)
        self._interval_s = min(2 * self._interval_s, MAX_ASK_S)
        self._ask(self._loop.time() - self._began)

    def stop(self) -> None:
        """The connection is lost."""
        self._timer.cancel()


def ask_client(exchange: Exchange, waited_s: float, *, carries_events: bool) -> None:
    """Writes bytes that a client ignores, if that is possible; closes the connection of a client that cannot be asked.

    Nothing is written while the client does not read, nor behind a complete answer, which ends the connection.
    """
    if not exchange.can_write:
        return
    if not exchange.is_begun:
        if not exchange.is_http_1_0:
            exchange.write_interim(INTERIM)
        elif waited_s >= UNASKED_S:
            exchange.abort()
    elif carries_events:
        exchange.write_part(COMMENT)
