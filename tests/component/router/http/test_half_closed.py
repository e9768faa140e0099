"""Clients that end their side of a connection: who still reads gets the answers, who has gone is found out."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket

import pytest

from kvrelay_router.http import half_closed
from kvrelay_router.http.connection import BoundedConnection
from kvrelay_router.http.half_closed import COMMENT, INTERIM
from tests.component.router.http.test_streams_under_load import connect, connections, request
from tests.component.router.rig import Router
from tests.fakes.waiting import PATIENCE_S, until

TEXT = "An otter is a mammal."
CHUNKED_COMMENT = b"3\r\n" + COMMENT + b"\r\n"


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends its side."""
    return await asyncio.wait_for(reader.read(), PATIENCE_S)


def whole_text(answer: bytes) -> str:
    """Of a plain answer, or of a stream's events; comments and interim answers are left out, as clients do."""
    while answer.startswith(INTERIM):
        answer = answer.removeprefix(INTERIM)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"200", head
    assert b"connection: close" in head
    if b"event-stream" not in head:
        return str(json.loads(body)["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_one_that_reads_on_gets_its_answer_at_once(
    router: Router, version: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_closed, "UNASKED_S", PATIENCE_S)  # however slow this machine is
    reader, writer = await connect(router)
    writer.write(request(stream=False).replace(b"HTTP/1.1", version))
    writer.write_eof()
    assert whole_text(await rest_of(reader)) == TEXT
    await until(lambda: not connections(router))
    assert router.dispatcher.handles[0].cancelled_at is None
    writer.close()


@pytest.mark.parametrize(("stream", "hang_after"), [(False, 0), (False, 2), (True, 0), (True, 2)])
async def test_one_that_reads_on_is_asked_and_gets_its_answer_whenever_it_comes(
    router: Router, stream: bool, hang_after: int
) -> None:
    resume = asyncio.Event()
    router.answers(TEXT, hang_after=hang_after, resume=resume)
    reader, writer = await connect(router)
    writer.write(request(stream=stream))
    writer.write_eof()
    question = CHUNKED_COMMENT if stream and hang_after else INTERIM
    answer = b""
    for _ in range(2):
        answer += await asyncio.wait_for(reader.readuntil(question), PATIENCE_S)
    resume.set()
    answer += await rest_of(reader)
    assert whole_text(answer) == TEXT
    assert router.dispatcher.handles[0].cancelled_at is None
    writer.close()


async def test_a_stream_of_http_1_0_is_asked_without_chunks(router: Router) -> None:
    resume = asyncio.Event()
    router.answers(TEXT, hang_after=2, resume=resume)
    reader, writer = await connect(router)
    writer.write(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = await asyncio.wait_for(reader.readuntil(b"\n\n"), PATIENCE_S)
    writer.write_eof()
    answer += await asyncio.wait_for(reader.readuntil(b"\n\n" + COMMENT), PATIENCE_S)
    resume.set()
    answer += await rest_of(reader)
    assert whole_text(answer) == TEXT
    assert b"\r\n" + CHUNKED_COMMENT not in answer
    writer.close()


def test_a_client_library_passes_over_the_questions() -> None:
    """Python's own, which knows no interim answer but this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(INTERIM * 3 + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        response = http.client.HTTPResponse(theirs)
        response.begin()
        assert (response.status, response.read()) == (200, b"hi")


async def test_all_whole_requests_of_a_pipeline_are_answered(router: Router) -> None:
    reader, writer = await connect(router)
    writer.write(request(stream=False) * 3 + request()[:40])
    writer.write_eof()
    answer = await rest_of(reader)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"connection: close") == 1
    assert answer.count(json.dumps(TEXT).encode()) == 3
    writer.close()


@pytest.mark.parametrize("sent", [b"", request()[:20], request()[:-1]])
async def test_what_is_no_whole_request_gets_no_answer(router: Router, sent: bytes) -> None:
    reader, writer = await connect(router)
    writer.write(sent)
    writer.write_eof()
    assert await rest_of(reader) == b""
    assert not router.dispatcher.handles
    writer.close()


async def test_one_that_goes_later_is_found_out(router: Router) -> None:
    router.answers(TEXT, hang_after=0)
    reader, writer = await connect(router)
    writer.write(request(stream=False))
    writer.write_eof()
    await asyncio.wait_for(reader.readuntil(INTERIM), PATIENCE_S)
    assert router.dispatcher.handles[0].cancelled_at is None
    writer.close()
    await until(lambda: router.dispatcher.handles[0].cancelled_at is not None)
    await until(lambda: not connections(router))


async def test_one_of_http_1_0_that_cannot_be_asked_has_gone(router: Router) -> None:
    router.answers(TEXT, hang_after=0)
    reader, writer = await connect(router)
    writer.write(request(stream=False).replace(b"HTTP/1.1", b"HTTP/1.0"))
    writer.write_eof()
    assert await rest_of(reader) == b""
    await until(lambda: router.dispatcher.handles[0].cancelled_at is not None)
    writer.close()


async def test_one_that_went_behind_something_that_passes_bytes_on_is_found_out(router: Router) -> None:
    """It passes the end of the client's side on, and notices that the client has gone only when it writes to it."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await connect(router)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.write_eof()

        forth = asyncio.create_task(copy(reader, behind_writer))
        try:
            await copy(behind_reader, writer)
        except ConnectionError:
            behind_writer.close()
        await forth
        writer.close()

    router.answers(TEXT, hang_after=0)
    between = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(stream=False))
    await until(lambda: len(router.dispatcher.handles) == 1)
    writer.close()
    await until(lambda: router.dispatcher.handles[0].cancelled_at is not None)
    between.close()


async def test_one_that_reads_nothing_is_not_asked(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is asked would only wait behind the rest."""
    asked: list[float] = []
    ask = BoundedConnection._ask_client

    def noted(connection: BoundedConnection, waited_s: float) -> None:
        asked.append(waited_s)
        ask(connection, waited_s)

    monkeypatch.setattr(half_closed, "MAX_ASK_S", 0.01)
    monkeypatch.setattr(BoundedConnection, "_ask_client", noted)
    router.answers(TEXT, hang_after=2)
    reader, writer = await connect(router)
    writer.write(request())
    await asyncio.wait_for(reader.readuntil(b"\n\n"), PATIENCE_S)
    (connection,) = connections(router)
    connection.flow.pause_writing()
    writer.write_eof()
    await until(lambda: len(asked) > 5)
    connection.flow.resume_writing()
    answer = await asyncio.wait_for(reader.readuntil(CHUNKED_COMMENT), PATIENCE_S)
    assert answer.count(COMMENT) == 1
    writer.close()
    await until(lambda: not connections(router))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
async def test_time_without_acknowledgement_is_bounded(router: Router) -> None:
    router.answers(TEXT, hang_after=0)
    reader, writer = await connect(router)
    writer.write(request(stream=False))
    writer.write_eof()
    await asyncio.wait_for(reader.readuntil(INTERIM), PATIENCE_S)
    (connection,) = connections(router)
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == half_closed.SILENT_S * 1000
    writer.close()
