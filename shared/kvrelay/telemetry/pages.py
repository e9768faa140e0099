"""A minimal HTTP server for health, readiness and metrics pages of processes without another HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Maximum open connections; more are closed at once. Only probes and scrapers read these pages."""


@dataclass(frozen=True, slots=True)
class Page:
    """One HTTP response."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


class Pages:
    """Answers GET and HEAD by path, one response per connection. Pages are made on the event loop per request."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Starts listening; port 0 means any free port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and closes open connections. Safe if it was never started."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) < MAX_CONNECTIONS:
                self._open.add(task)
                with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(HEAD_TIMEOUT_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(self._answer(head))
                        await writer.drain()
        finally:
            self._open.discard(task)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _rendered(Page(b"not HTTP/1\n", HTTPStatus.BAD_REQUEST))
        method, target, _ = parts
        if method not in (b"GET", b"HEAD"):
            return _rendered(Page(b"only GET\n", HTTPStatus.METHOD_NOT_ALLOWED))
        make = self._pages.get(target.split(b"?", 1)[0].decode("latin-1"))
        try:
            page = Page(b"no such page\n", HTTPStatus.NOT_FOUND) if make is None else make()
        except Exception:
            log.exception("the page %s failed", target.decode("latin-1"))
            page = Page(b"failed; see the log\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        return _rendered(page, with_body=method == b"GET")


def _rendered(page: Page, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\ncontent-type: {page.content_type}\r\n"
        f"content-length: {len(page.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (page.body if with_body else b"")
