"""Answers connections that break a bound with an error, and closes them."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from kvrelay_router.http.anthropic_errors import error_response
from kvrelay_router.http.api_error import ApiError

LINGER_S = 1.0
"""A refused connection is read for this time before it is closed: a reset would overtake the answer."""
_PHRASES = {529: "Overloaded"}
"""Reason phrases of statuses that HTTP does not define."""
MAX_LINGERING = 256
"""Further refused connections are closed at once, without an answer."""


class Refusals:
    """The refused connections of a server that are still open."""

    def __init__(self) -> None:
        self.num_lingering = 0

    def answer(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, error: ApiError, path: str) -> None:
        """Writes the error, in the form of the API to which the path belongs, and its end. Closes the connection after
        `LINGER_S`."""
        if self.num_lingering >= MAX_LINGERING:
            transport.close()
            return
        transport.write(_raw_answer(error, path))
        if transport.can_write_eof():
            transport.write_eof()
        self.num_lingering += 1
        loop.call_later(LINGER_S, self._close, transport)

    def _close(self, transport: asyncio.Transport) -> None:
        self.num_lingering -= 1
        transport.close()


def _raw_answer(error: ApiError, path: str) -> bytes:
    error.headers = {**error.headers, "connection": "close"}
    response = error_response(error, path)
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    phrase = _PHRASES.get(error.status) or HTTPStatus(error.status).phrase
    return b"HTTP/1.1 %d %b\r\n" % (error.status, phrase.encode()) + head + b"\r\n" + bytes(response.body)
