"""Writes large JSON documents in parts, so that neither the document nor its rows exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay_router.loop_share import LoopShare

SLICE_VALUES = 1024
"""Values that are converted at a time: about a millisecond."""
PART_BYTES = 64 << 10
"""Parts are joined to about this size before they are sent."""


class Rows:
    """A JSON array whose items are made when they are written. `make(start, stop)` returns that slice of the items, and
    `values_per_row` says how much work each is."""

    __slots__ = ("_make", "num_rows", "values_per_row")

    def __init__(self, num_rows: int, make: Callable[[int, int], list[Any]], values_per_row: int = 1) -> None:
        self.num_rows, self.values_per_row = num_rows, values_per_row
        self._make = make

    def all(self) -> list[Any]:
        return self._make(0, self.num_rows)

    def slices(self) -> Iterator[list[Any]]:
        step = max(1, SLICE_VALUES // self.values_per_row)
        for start in range(0, self.num_rows, step):
            yield self._make(start, min(start + step, self.num_rows))


def dump_at_once(document: Any) -> bytes:
    """The JSON of a small document, which may contain `Rows`."""
    return orjson.dumps(document, default=_rows_of)


def _rows_of(value: Any) -> list[Any]:
    if isinstance(value, Rows):
        return value.all()
    raise TypeError


def json_parts(value: Any) -> Iterator[bytes]:
    """The same JSON in parts: members of objects, items of arrays of objects, and slices of `Rows`."""
    match value:
        case Rows():
            yield b"["
            separator = b""
            for rows in value.slices():
                yield separator + orjson.dumps(rows)[1:-1]
                separator = b","
            yield b"]"
        case dict():
            separator = b"{"
            for key, member in value.items():
                yield separator + orjson.dumps(key) + b":"
                yield from json_parts(member)
                separator = b","
            yield b"}" if value else b"{}"
        case [dict(), *_]:
            separator = b"["
            for item in value:
                yield separator
                yield from json_parts(item)
                separator = b","
            yield b"]"
        case _:
            yield orjson.dumps(value)


async def send_parts(parts: Iterator[bytes], send: Send) -> None:
    """Sends parts of a body as fast as the client reads. Other callbacks run between them."""
    share, waiting, num_bytes = LoopShare(), [], 0
    for part in parts:
        waiting.append(part)
        num_bytes += len(part)
        if num_bytes >= PART_BYTES:
            await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
            waiting, num_bytes = [], 0
        await share.pause()
    if waiting:
        await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})


class PartsResponse(Response):
    """An answer whose JSON is written while it is sent. It has no content-length."""

    def __init__(self, document: Any, headers: dict[str, str] | None = None) -> None:
        super().__init__(None, 200, headers, "application/json")
        self._document = document
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_parts(json_parts(self._document), send)
        await send({"type": "http.response.body", "body": b""})
