"""Forms of HTTP that clients and proxies use beside the plain one: offers of HTTP/2, HTTP/1.0, pieces, pipelines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router
from tests.fakes.waiting import PATIENCE_S

TEXT = "An otter is a mammal."
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = (
    "connection: keep-alive, upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def completion(*headers: str, version: str = "1.1", chunked: bool = False, **fields: Any) -> bytes:
    """A request for a completion."""
    body = json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\n{''.join(headers)}{length}\r\n\r\n".encode()
    if not chunked:
        return head + body
    pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
    return head + b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nx-after: 1\r\n\r\n"


LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def exchange(router: Router, *pieces: bytes) -> bytes:
    """What a connection gives until the router closes it; each piece is sent when the one before was taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


def texts(answers: bytes) -> list[str]:
    """The completions in what came on a connection."""
    return [
        json.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        for part in answers.split(b"HTTP/1.1 200 OK\r\n")
        if b'"text_completion"' in part
    ]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_another_protocol_is_passed_over(router: Router, offer: str, chunked: bool) -> None:
    last = completion("connection: close\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
    answers = b""
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            writer.write(completion(offer, chunked=chunked))
            answers += await reader.readuntil(b"}}}")
        writer.write(last)
        assert texts(answers + await reader.read()) == [TEXT] * 3
    writer.close()


async def test_a_tunnel_is_refused(router: Router) -> None:
    answers = await exchange(router, b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answers


@pytest.mark.parametrize("connection", ["", "connection: keep-alive\r\n"])
async def test_a_stream_to_a_client_of_http_1_0_comes_in_one_piece(router: Router, connection: str) -> None:
    router.answers(TEXT, per_delta=1)
    answer = await exchange(router, completion(connection, version="1.0", stream=True))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert len(pieces) > 5 and "".join(pieces) == TEXT


async def test_a_whole_answer_to_a_client_of_http_1_0(router: Router) -> None:
    answer = await exchange(router, completion(version="1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["choices"][0]["text"] == TEXT
    answer = await exchange(router, b"GET /v1/models/nothing HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ") and b"model_not_found" in answer


async def test_a_whole_request_is_answered_although_the_next_is_cut_by_what_is_no_http(router: Router) -> None:
    unfinished = completion(chunked=True).partition(b"\r\n\r\n")[0] + b'\r\n\r\n5\r\n{"mod\r\nno length\r\n'
    assert texts(await exchange(router, completion() + unfinished)) == [TEXT]


async def test_a_body_that_is_cut_by_what_is_no_http_is_400(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    unfinished = completion(chunked=True).partition(b"\r\n\r\n")[0] + b'\r\n\r\n5\r\n{"mod\r\nno length\r\n'
    answer = await exchange(router, unfinished)
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not router.dispatcher.handles
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_a_body_without_a_length_is_none(router: Router) -> None:
    """What follows the head is the next request then, and no HTTP."""
    request = completion().replace(b"content-length", b"x-length")
    answers = await exchange(router, request)
    assert answers.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_json"' in answers


async def test_a_client_that_asks_to_go_on_is_told_so(router: Router) -> None:
    request = completion("expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body + LAST)
        assert texts(await reader.read()) == [TEXT]
    writer.close()
