"""A client that sends one request after the other on one connection. httpx takes four times as long for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes.waiting import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    text: str


class OneConnection:
    """Opens the connection again where the server closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        async with asyncio.timeout(PATIENCE_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(head.encode() + data)
            answer = await _read(reader)
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _read(reader: asyncio.StreamReader) -> Answer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    content = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            content += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        content = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(first.split()[1]), headers, content.decode())


@asynccontextmanager
async def one_connection(port: int) -> AsyncIterator[OneConnection]:
    connection = OneConnection(port)
    try:
        yield connection
    finally:
        connection.close()
