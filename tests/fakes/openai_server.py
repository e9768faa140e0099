"""An OpenAI-compatible server that answers as it is told, and writes down when it said what. Times: perf_counter."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Send = Callable[[bytes], Coroutine[Any, Any, None]]
Script = Callable[["Exchange"], Coroutine[Any, Any, None]]

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


@dataclass
class Exchange:
    """One request, and the way to answer it. `said_s`: when each piece of the answer was handed to the socket."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    write: Send
    said_s: list[float] = field(default_factory=list)

    async def head(self, status: str = "200 OK", content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.write(head.encode())

    async def raw(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, content: dict[str, Any]) -> None:
        self.said_s.append(time.perf_counter())
        await self.raw(b"data: " + json.dumps(content).encode() + b"\n\n")

    async def piece(self, text: str, finish: str | None = None, **more: Any) -> None:
        """One chunk of a choice, as the endpoint that was asked writes it."""
        is_chat = self.path.endswith("chat/completions")
        said = {"delta": {"content": text}} if is_chat else {"text": text}
        await self.event({"choices": [{"index": 0, **said, "finish_reason": finish, **more}]})

    async def end(self, *, done: bool = True) -> None:
        if done:
            await self.raw(b"data: [DONE]\n\n")
        await self.write(b"0\r\n\r\n")


@dataclass
class OpenAiServer:
    """`script` answers each request; `exchanges` are all that came, models apart."""

    script: Script
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    num_connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                fields = [line.partition(":") for line in lines[1:]]
                headers = {name.lower(): value.strip() for name, _, value in fields}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = lines[0].split(" ")[1]
                if path.endswith("/models"):
                    answer = json.dumps({"data": [{"id": "fake-model"}]}).encode()
                    await write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
                    continue
                exchange = Exchange(path, headers, json.loads(body), write)
                self.exchanges.append(exchange)
                await self.script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def openai_server(script: Script) -> AsyncIterator[OpenAiServer]:
    """Serves on a free port of loopback."""
    server = OpenAiServer(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
