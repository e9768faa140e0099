"""Finds out whether a client that ended its side of a connection still waits for its answer.

A client that waits and a client that is gone send the same FIN, and a half-closed connection says nothing about the
client's interest (RFC 9112, 6.3). A write makes the difference: the system of a client that is gone answers it with a
reset, which the next write finds. So the client is probed with bytes that mean nothing: an interim answer before its
answer (clients must accept any number of them, RFC 9110, 15.2), or a comment between the events of a stream. Clients of
HTTP/1.0 know no interim answers, and some are proxies whose own clients leave. They count as gone unless the answer
begins at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvrelay_router.http.uvicorn_internals import Exchange

FIRST_ASK_S = 0.05
"""Time until the first probe: fast answers need none. The interval doubles after each probe, ..."""
MAX_ASK_S = 5.0
"""... up to this: a proxy may need several probes until the reset arrives here."""
UNASKED_S = 0.5
"""A client of HTTP/1.0 counts as gone if its answer has not begun within this time."""
SILENT_S = 30
"""A client whose system neither acknowledges nor resets counts as gone after this time (Linux)."""

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"


class HalfClosedWatch:
    """Calls `ask` at growing intervals until `stop`, with the seconds since the start."""

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
            with contextlib.suppress(OSError):  # the connection was reset; the next write finds it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)

    def _ask_again(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._ask_again)
        self._interval_s = min(2 * self._interval_s, MAX_ASK_S)
        self._ask(self._loop.time() - self._began)

    def stop(self) -> None:
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
