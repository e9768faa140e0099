"""HTTP/1.1 client for one server, with kept connections and answers passed on as they arrive.

It works little per byte, because it may share the cores with the measured server: httptools parses in C, request bodies
are made before the load begins, and nothing is awaited between a packet and its time stamp.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvrelay_bench.answer_reader import AnswerReader, Record


class BadUrl(ValueError):
    """The URL is invalid. The message has the reason."""


class ConnectionLost(Exception):
    """The server closed before the answer was complete. `was_silent`: it had sent nothing of it."""

    def __init__(self, *, was_silent: bool) -> None:
        super().__init__("the connection was closed" + (" without an answer" if was_silent else " in the answer"))
        self.was_silent = was_silent


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL with or without /v1, and the API key for it."""

    url: str
    api_key: str = ""

    def path(self, name: str) -> str:
        """The path of `completions`, `chat/completions` or `models`."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base if base.endswith('/v1') else f'{base}/v1'}/{name}"


class Client:
    """Connections to one endpoint. The constructor raises BadUrl."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadUrl(f"{endpoint.url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise BadUrl(f"{endpoint.url!r} must be http://HOST[:PORT][/PATH] or https://...")
        self.endpoint = endpoint
        self.started = time.perf_counter()
        self._host, self._netloc = host, parts.netloc.rpartition("@")[2]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._address: str | None = None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def clock(self) -> float:
        """Seconds since `started`."""
        return time.perf_counter() - self.started

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Encodes a request for the wire."""
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._netloc}\r\naccept: */*\r\n"
        if self.endpoint.api_key:
            head += f"authorization: Bearer {self.endpoint.api_key}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body

    async def send(self, request: bytes, record: Record, timeout_s: float) -> None:
        """Sends a request and fills in `record`; failures are recorded in its `error`."""
        record.started_s = self.clock()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request, record)
        except TimeoutError:
            record.error = f"no whole answer within {timeout_s:g} s"
        except ConnectionLost as error:
            record.error = record.error or str(error)
        except OSError as error:
            record.error = f"cannot connect: {error}"
        if record.ended_s != record.ended_s:  # NaN: the answer has no end
            record.ended_s = self.clock()

    async def get(self, name: str, timeout_s: float) -> bytes:
        """Fetches a body, whatever the status. Raises OSError, TimeoutError, ConnectionLost."""
        async with asyncio.timeout(timeout_s):
            connection = await self._connect()
            return await connection.fetch(self.request("GET", self.endpoint.path(name)))

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)

    async def _send(self, request: bytes, record: Record) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._use(connection, request, record)
                except ConnectionLost as error:
                    if not error.was_silent:
                        raise  # otherwise the server closed an idle connection while the request was in flight
        return await self._use(await self._connect(), request, record)

    async def _use(self, connection: _Connection, request: bytes, record: Record) -> None:
        try:
            await connection.exchange(request, record)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._address is None:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._address = await self._first_that_answers([str(each[4][0]) for each in found])
        name = self._host if self._tls else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self), self._address, self._port, ssl=self._tls, server_hostname=name
        )
        self._open.add(connection)
        return connection

    async def _first_that_answers(self, addresses: list[str]) -> str:
        for address in addresses[:-1]:
            try:
                _, writer = await asyncio.open_connection(address, self._port)
            except OSError:
                continue
            writer.close()
            return address
        return addresses[-1]

    def forget(self, connection: _Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time."""

    def __init__(self, client: Client) -> None:
        self.is_open = True
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._record: Record | None = None
        self._reader: AnswerReader | None = None
        self._body: list[bytes] = []
        self._content_type = ""
        self._is_framed = False  # by its length or in chunks, else the connection's end is the answer's
        self._whole: asyncio.Future[None] | None = None
        self._at_s = 0.0

    # -- called by Client ---------------------------------------------------------------------------------------------

    async def exchange(self, request: bytes, record: Record) -> None:
        """Sends a request and returns at the end of its answer. Raises ConnectionLost."""
        self._record = record
        await self._start(request)

    async def fetch(self, request: bytes) -> bytes:
        """Like `exchange`, but returns the complete body."""
        self._record = None
        self._body = []
        await self._start(request)
        self.close()
        return b"".join(self._body)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def _start(self, request: bytes) -> None:
        assert self._transport is not None
        self._whole = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reader = None
        self._content_type, self._is_framed = "", False
        self._transport.write(request)
        await self._whole

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def data_received(self, data: bytes) -> None:
        """Takes the time before any processing."""
        self._at_s = self._client.clock()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(OSError(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that ends with the connection is complete, any other is not."""
        self.is_open = False
        self._client.forget(self)
        self._at_s = self._client.clock()
        if self._reader is not None and not self._is_framed:
            self.on_message_complete()
        else:
            self._fail(ConnectionLost(was_silent=self._reader is None))

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = value.decode("latin-1").lower()
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200:
            record = self._record or Record(0.0)
            self._reader = AnswerReader(record, self._parser.get_status_code(), self._content_type)

    def on_body(self, data: bytes) -> None:
        if self._record is None:
            self._body.append(data)
        elif self._reader is not None:
            self._reader.feed(data, self._at_s)

    def on_message_complete(self) -> None:
        if self._whole is None or self._whole.done() or self._reader is None or self._parser is None:
            return
        self._reader.end(self._at_s)
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if not self.is_open:
            self.close()
        self._whole.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(error)
        self.close()
