"""Writes the events of a stream (server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html).

Each API's format makes the bytes of its events, `data:` and blank line included.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Generator, Iterable
from typing import Any

from starlette.types import Send

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Characters at which readers of lines, such as httpx's, end a line of an event, and their form in JSON."""


def escaped(events: bytes) -> bytes:
    """The events, without such characters in their JSON."""
    if 0xE2 in events or 0xC2 in events:  # their first bytes
        for character, in_json in _LINE_ENDS:
            events = events.replace(character, in_json)
    return events


class EventStream:
    """The answer of one request. Its task uses `start`, `send` and `end`; callbacks use `write`.

    ASGI's `send` suspends only while the client reads slowly, so a callback steps it once, which spares the wake-up of
    a task for each event. A `send` that suspends is finished by a task of its own, and the stream is not ready until
    then.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._unfinished: asyncio.Task[None] | None = None
        self.is_started = False

    def is_ready(self) -> bool:
        """Whether `write` may be called."""
        return self.is_started and (self._unfinished is None or self._unfinished.done())

    def write(self, events: bytes) -> None:
        """Writes events, without waiting."""
        steps = self._send({"type": "http.response.body", "body": escaped(events), "more_body": True}).__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return
        self._unfinished = asyncio.get_running_loop().create_task(_finish(awaited, steps))

    async def start(self, headers: Iterable[tuple[str, str]]) -> None:
        """Writes the head: status 200, and these headers beside `HEADERS`."""
        self.is_started = True
        own = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *own]})

    async def send(self, events: bytes) -> None:
        """Writes events once the client has read enough of those before."""
        await self._send_part(events, is_last=False)

    async def end(self, events: bytes) -> None:
        """Writes the last events like `send`, and ends the response."""
        await self._send_part(events, is_last=True)

    async def _send_part(self, events: bytes, *, is_last: bool) -> None:
        if self._unfinished is not None and not self._unfinished.done():
            await self._unfinished
        await self._send({"type": "http.response.body", "body": escaped(events), "more_body": not is_last})


async def _finish(awaited: Any, steps: Generator[Any, Any, None]) -> None:
    await _rest(awaited, steps)


@types.coroutine
def _rest(awaited: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Goes on with an awaitable that has been stepped once and waits for `awaited`."""
    yield awaited
    yield from steps
