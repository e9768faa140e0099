"""Connections, heads of requests and time: what a client may hold of a router is bounded, and refused by name."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.text.request.validation import ModelLimits
from kvrelay_router.http import http_server
from kvrelay_router.http.http_server import ConnectionLimits
from tests.component.router.http.test_streams_under_load import (
    connect,
    connections,
    read_answer,
    request,
    unread_stream,
)
from tests.component.router.rig import Router
from tests.fakes.waiting import PATIENCE_S, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
TIGHT = ConnectionLimits(max_connections=4, max_header_bytes=4096)


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer that ends the connection."""
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x-long: " + b"a" * 5000 + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: a\r\n" % number for number in range(600)) + b"\r\n",
        HEAD + b"x-endless: " + b"a" * 300_000,
        b"GET /" + b"a" * 9000,
        b"\r\n" * 5000,
        request().replace(b"content-length", b"x-y: " + b"a" * 5000 + b"\r\ncontent-length"),
    ],
)
@pytest.mark.parametrize("piece", [1 << 20, 700])
async def test_a_head_that_is_too_large_is_431(make_router: Callable[..., Any], data: bytes, piece: int) -> None:
    async with make_router(connections=TIGHT) as router:
        reader, writer = await connect(router)
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await asyncio.sleep(0)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "4096 bytes" in error["message"]
        assert not router.dispatcher.handles
        writer.close()


async def test_a_later_head_on_a_connection_is_refused_too(make_router: Callable[..., Any]) -> None:
    async with make_router(connections=TIGHT) as router:
        reader, writer = await connect(router)
        writer.write(request())
        assert await read_answer(reader) == "An otter is a mammal."
        writer.write(HEAD + b"x-long: " + b"a" * 5000 + b"\r\n\r\n")
        status, error = await refusal(reader)
        assert (status, error["code"]) == (431, "headers_too_large")
        writer.close()


async def test_headers_that_follow_a_body_without_end_end_the_connection(make_router: Callable[..., Any]) -> None:
    async with make_router(connections=TIGHT) as router:
        _, writer = await connect(router)
        body = request().partition(b"\r\n\r\n")[2]
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n" % len(body) + body + b"\r\n0\r\n")
        writer.write(b"x-trailer: ")

        def write_on() -> bool:
            """Whether the router has ended the connection."""
            if not writer.is_closing():
                writer.write(b"a" * 1000)
            return writer.is_closing()

        await until(write_on)
        assert not router.dispatcher.handles
        writer.close()


async def test_heads_just_below_the_limit_are_served(make_router: Callable[..., Any]) -> None:
    async with make_router(connections=TIGHT) as router:
        reader, writer = await connect(router)
        padded = request().replace(b"content-length", b"x-y: " + b"a" * 3800 + b"\r\ncontent-length")
        for _ in range(3):
            writer.write(padded)
            assert await read_answer(reader) == "An otter is a mammal."
        writer.write(request(prompt="otter " * 2000, max_tokens=0))  # bodies do not count
        assert b"context" in await reader.readuntil(b"}}")
        writer.close()


async def test_connections_beyond_the_limit_are_refused_and_the_others_served(
    make_router: Callable[..., Any],
) -> None:
    async with make_router(connections=TIGHT) as router:
        held = [await connect(router) for _ in range(4)]
        await until(lambda: len(connections(router)) == 4)
        reader, writer = await connect(router)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (503, "too_many_connections")
        writer.close()
        held[0][1].write(request())
        assert await read_answer(held[0][0]) == "An otter is a mammal."
        held[1][1].close()
        await until(lambda: len(connections(router)) == 3)
        again, writer = await connect(router)
        writer.write(request())
        assert await read_answer(again) == "An otter is a mammal."
        for _, each in (*held, (again, writer)):
            each.close()


async def test_a_head_that_does_not_come_is_408(make_router: Callable[..., Any]) -> None:
    async with make_router(connections=ConnectionLimits(header_timeout_s=0.05)) as router:
        reader, writer = await connect(router)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b"", "without a request there is nothing to answer"
        writer.close()
        reader, writer = await connect(router)
        writer.write(HEAD)
        status, error = await refusal(reader)
        assert status == 408 and "too long" in error["message"]
        writer.close()


@pytest.mark.parametrize("rest", [b"x: " + b"y" * 10_000, b"x: y\r\n" * 2000], ids=["one line", "many lines"])
async def test_a_head_that_drips_is_408_and_others_are_served_meanwhile(
    make_router: Callable[..., Any], rest: bytes
) -> None:
    """Each byte comes in time. The limit is on the whole head."""
    async with make_router(connections=ConnectionLimits(header_timeout_s=0.5)) as router:
        dripping = [await connect(router) for _ in range(20)]

        async def drip(writer: asyncio.StreamWriter) -> None:
            while True:
                for byte in HEAD + rest:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(drip(writer)) for _, writer in dripping]
        assert (await router.http.get("/health")).status_code == 200
        for reader, _ in dripping:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
        for task, (_, writer) in zip(tasks, dripping, strict=True):
            task.cancel()
            writer.close()


async def test_what_is_no_http_is_400_in_the_same_shape(router: Router) -> None:
    reader, writer = await connect(router)
    writer.write(b"\x16\x03\x01 this is TLS, or something else\r\n\r\n")
    status, error = await refusal(reader)
    assert (status, error["code"]) == (400, "invalid_http")
    writer.close()


async def test_a_client_that_reads_nothing_for_too_long_is_left(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's own deadline would end its work, but not the wait for room to tell the client so."""
    connection, writer = await unread_stream(router)
    monkeypatch.setattr(http_server, "UNREAD_S", 0.0)
    num_unread = connection.transport.get_write_buffer_size()
    connection._check_reader(num_unread + 1)  # some of it was read: it has its time again, which is over at once
    assert connections(router) == [connection]
    await until(lambda: not connections(router))
    await until(lambda: router.dispatcher.handles[0].cancelled_at is not None)
    writer.close()


async def test_a_client_that_never_reads_the_rest_holds_no_connection_that_closes(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer that fits the connection's buffer, which therefore never counts as full."""
    monkeypatch.setattr(http_server, "UNREAD_S", 0.5)
    router.dispatcher.model_limits = ModelLimits(10**6, 400)
    router.answers("otter " * 8000, per_delta=1000)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", router.server.port))
    await until(lambda: connections(router))
    (connection,) = connections(router)
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    asked = request(stream=False, max_tokens=20_000).replace(b"host: x", b"connection: close")
    await asyncio.get_running_loop().sock_sendall(client, asked)
    await until(lambda: connection.transport.is_closing())
    assert 0 < connection.transport.get_write_buffer_size() < 64 << 10
    await until(lambda: not connections(router))
    client.close()


KEYLESS = HEAD + b"content-length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "piece"), [(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"), (KEYLESS, b"a"), (KEYLESS, b"")]
)
async def test_what_begins_no_request_holds_no_idle_connection(
    make_router: Callable[..., Any], asked: bytes, piece: bytes
) -> None:
    """Empty lines, and the body of a request that was answered without it, however slowly they come."""
    async with make_router(api_keys=("key",), connections=ConnectionLimits(header_timeout_s=0.1)) as router:
        reader, writer = await connect(router)
        writer.write(asked)
        answer = await reader.readuntil(b"}")
        assert b" 200 " in answer or b" 401 " in answer

        async def write_on() -> None:
            writer.write(b"a" if piece == b"" else b"")
            while connections(router):
                writer.write(piece)
                await asyncio.sleep(0.01)

        await asyncio.wait_for(write_on(), PATIENCE_S)
        writer.close()


async def test_a_connection_serves_on_after_an_answer_that_came_before_its_requests_body(
    make_router: Callable[..., Any],
) -> None:
    async with make_router(api_keys=("key",)) as router:
        reader, writer = await connect(router)
        head, _, body = request(stream=False).partition(b"\r\n\r\n")
        for authorization, status in ((b"", b" 401 "), (b"\r\nauthorization: Bearer key", b" 200 ")) * 2:
            writer.write(head + authorization + b"\r\n\r\n")
            if status == b" 401 ":
                assert status in await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
                writer.write(body)
            else:
                writer.write(body)
                assert status in await asyncio.wait_for(reader.readuntil(b"}}}"), PATIENCE_S)
        await until(lambda: [each.timeout_keep_alive_task is not None for each in connections(router)] == [True])
        writer.close()
