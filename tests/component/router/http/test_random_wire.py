"""Connections as anything may use them: requests of all kinds one behind the other, in pieces of any size, and any end.

Whole requests are answered in their order, nothing else is, and no connection stays. Clients that leave get no more.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
from dataclasses import dataclass

import pytest

from tests.component.router.http.test_streams_under_load import connections, request
from tests.component.router.rig import Router
from tests.fakes.waiting import PATIENCE_S, until

TEXT = "An otter is a mammal."
INVALID_HTTP = (400, "invalid_http")
UNKNOWN_URL = (404, "unknown_url")
NUM_CONNECTIONS = 25  # a seed


@dataclass(frozen=True)
class Asked:
    """A request, and its answer's status with its text or error code."""

    data: bytes
    answer: tuple[int, str]


def post(path: str, body: bytes, extra: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{extra}content-length: {len(body)}\r\n\r\n".encode() + body


def chunked(data: bytes, draw: random.Random) -> bytes:
    """The same request with its body in pieces."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not body:
        return data
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    pieces = []
    while body:
        size = draw.randint(1, len(body))
        pieces.append(b"%x\r\n%b\r\n" % (size, body[:size]))
        body = body[size:]
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b"".join(pieces) + b"0\r\n\r\n"])


KINDS = [
    Asked(request(stream=True), (200, TEXT)),
    Asked(request(stream=False), (200, TEXT)),
    Asked(request(path="/v1/chat/completions", messages=[{"role": "user", "content": "x"}]), (200, TEXT)),
    Asked(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", (200, "ok")),
    Asked(post("/v1/completions", b"{"), (400, "invalid_json")),
    Asked(post("/v1/completions", b"{}", "expect: 100-continue\r\n"), (400, "missing_required_parameter")),
    Asked(post("/v1/nothing", b"a" * 100), UNKNOWN_URL),
    Asked(b"DELETE /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", (405, "method_not_allowed")),
]
JUNK = [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", post("/health", b"", "content-length: x\r\n")]


class Client(asyncio.Protocol):
    """Keeps all that comes, also where a reset ends it."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


def read_answers(received: bytes) -> list[tuple[int, str]]:
    """All answers that came on a connection."""
    stream, answers = io.BytesIO(received), []
    while head := stream.readline():
        status, headers = int(head.split()[1]), {}
        while line := stream.readline().strip():
            name, _, value = line.partition(b": ")
            headers[name.lower()] = value
        if status == 100:
            continue
        body = b""
        if headers.get(b"transfer-encoding") == b"chunked":
            while size := int(stream.readline(), 16):
                body += stream.read(size + 2)[:-2]
            assert stream.readline() == b"\r\n"
        else:
            body = stream.read(int(headers[b"content-length"]))
        answers.append((status, told(body)))
    return answers


def told(body: bytes) -> str:
    """An answer's text, or its error's code."""
    if body.startswith((b"data: ", b":")):
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        content = json.loads(body)
        if "choices" not in content:
            return str(content["error"]["code"]) if "error" in content else str(content["status"])
        choices = content["choices"]
    parts = [each.get("text") or (each.get("delta") or each.get("message") or {}).get("content") for each in choices]
    return "".join(part for part in parts if part)


async def use_connection(router: Router, draw: random.Random) -> None:
    """One connection from its begin to its end."""
    asked = draw.choices(KINDS, k=draw.randint(0, 6))
    datas = [chunked(each.data, draw) if draw.random() < 0.3 else each.data for each in asked]
    datas = [draw.choice((b"", b"", b"\r\n")) + data for data in datas]
    end = draw.choice(("close", "cut", "junk"))
    possible = [each.answer for each in asked]
    if end == "close":
        datas.append(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        possible.append((200, "ok"))
    elif end == "cut":
        unfinished = draw.choice(KINDS)
        datas.append(unfinished.data[: draw.randint(1, len(unfinished.data) - 1)])
        possible += [unfinished.answer] if unfinished.answer == UNKNOWN_URL else []  # which needs no body
    elif end == "junk":
        datas.append(draw.choice(JUNK))
        possible.append(INVALID_HTTP)  # where nothing is being answered when it comes
    data = b"".join(datas)
    transport, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", router.server.port)
    while data and not transport.is_closing():
        size = draw.choice((len(data), draw.randint(1, len(data)), draw.randint(1, min(len(data), 20))))
        transport.write(data[:size])
        data = data[size:]
        await asyncio.sleep(draw.choice((0, 0, 0.001)))
    if end == "cut" and not transport.is_closing():
        transport.write_eof()
    await asyncio.wait_for(client.ended, PATIENCE_S)
    if end == "close":
        assert read_answers(bytes(client.received)) == possible
    elif end == "junk":
        assert read_answers(bytes(client.received)) in (possible[: len(asked)], possible)


@pytest.mark.parametrize("seed", range(8))
async def test_whole_requests_are_answered_in_their_order_and_every_connection_ends(router: Router, seed: int) -> None:
    router.answers(TEXT)
    draws = [random.Random(f"{seed}-{number}") for number in range(NUM_CONNECTIONS)]
    await asyncio.gather(*(use_connection(router, draw) for draw in draws))
    await until(lambda: not connections(router))
