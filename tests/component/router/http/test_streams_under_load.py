"""Streams as strangers use them: many at once, slow readers, pipelines, characters in pieces, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.request.validation import ModelLimits
from kvrelay_router.http.http_server import BoundedConnection, allowed_connections
from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.waiting import until

NO_TOKEN = -1
"""No detokenizer has a text for it."""
END = b"0\r\n\r\n"


def request(path: str = "/v1/completions", **body: Any) -> bytes:
    content = json.dumps({"model": MODEL, "prompt": "x", "stream": True} | body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def read_answer(reader: asyncio.StreamReader) -> str:
    """The text of one streamed answer; the connection can be used again."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


async def connect(router: Router) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", router.server.port)


def connections(router: Router) -> list[BoundedConnection]:
    return [each for each in router.server._server.server_state.connections if isinstance(each, BoundedConnection)]


async def unread_stream(router: Router) -> tuple[BoundedConnection, asyncio.StreamWriter]:
    """An endless stream whose client reads nothing, once the server's buffer is full: both its ends."""
    endless = Script([5] * 400_000, per_delta=4)
    router.dispatcher.script = lambda asked, sequence: endless
    router.dispatcher.model_limits = ModelLimits(10**6, 400)
    _, writer = await connect(router)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request(prompt=[9], max_tokens=400_000))
    await until(lambda: bool(connections(router)) and connections(router)[0].flow.write_paused)
    (connection,) = connections(router)
    return connection, writer


async def test_a_thousand_streams_at_once(router: Router) -> None:
    """Each gets its own text, whole."""
    assert allowed_connections(2500) == 2500
    text, end = " otters are mammals of rivers.", router.tokens("<|im_end|>")
    router.dispatcher.script = lambda asked, sequence: Script([*asked.prompt_ids, *router.tokens(text), *end])
    ends = [await connect(router) for _ in range(1000)]
    for number, (_, writer) in enumerate(ends):
        writer.write(request(prompt=f"{number}", max_tokens=100))
    answers = await asyncio.gather(*(read_answer(reader) for reader, _ in ends))
    assert answers == [f"{number}{text}" for number in range(1000)]
    assert len(connections(router)) == 1000
    for _, writer in ends:
        writer.close()
    await until(lambda: not connections(router))


async def test_a_slow_reader_costs_a_bounded_buffer(router: Router) -> None:
    connection, writer = await unread_stream(router)
    for _ in range(200):
        assert connection.transport.get_write_buffer_size() < 256 << 10
        await asyncio.sleep(0)
    router.answers("An otter is a mammal.")
    reader, other = await connect(router)
    other.write(request())
    assert await read_answer(reader) == "An otter is a mammal."
    assert router.dispatcher.handles[0].cancelled_at is None
    for each in (writer, other):
        each.close()


async def test_only_what_has_to_wait_comes_through_the_streams_task(router: Router) -> None:
    """The first delta of a stream, which the headers go out with."""
    answer = "An otter is a mammal."
    router.answers(answer)
    reader, writer = await connect(router)
    for prompt in ("x", ["x", "x"]):
        writer.write(request(prompt=prompt))
        await read_answer(reader)
    writer.close()
    num_deltas = len(router.tokens(answer)) + 1
    alone, *together = [handle.num_pushed for handle in router.dispatcher.handles]
    assert alone == num_deltas - 1
    assert all(0 < each < num_deltas for each in together)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 1}, {"stop": ["mam"]}, {"n": 2}, {"prompt": ["x", "y"]}])
async def test_the_end_comes_with_the_last_event(router: Router, options: dict[str, Any]) -> None:
    """Which comes through the stream's task, as those of real requests do."""
    router.dispatcher.pushes = False
    reader, writer = await connect(router)
    writer.write(request(**options))
    await reader.readuntil(b"\r\n\r\n")
    chunks = []
    while size := int(await reader.readline(), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    last, done, rest = chunks[-1].decode().split("\n\n")[-3:]
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] is not None
    assert all(b"[DONE]" not in chunk for chunk in chunks[:-1])
    writer.close()


async def test_what_fails_while_it_is_written_is_an_event_and_cancels(router: Router) -> None:
    """A delta that goes to the connection at once is dealt with in a callback of somebody else's."""
    tokens = [*router.tokens("An otter"), NO_TOKEN]
    router.dispatcher.script = lambda asked, sequence: Script(tokens, finish=FinishReason.LENGTH)
    answer = await router.post("/v1/completions", prompt="x", stream=True)
    *_, chunk, error, done, rest = answer.text.split("\n\n")
    assert json.loads(chunk.removeprefix("data: "))["choices"][0]["text"]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert (done, rest) == ("data: [DONE]", "")
    (handle,) = router.dispatcher.handles
    assert handle.num_pushed == len(tokens) - 1
    assert handle.cancelled_at is not None


async def test_what_is_written_does_not_wait_for_full_packets(router: Router) -> None:
    _, writer = await connect(router)
    await until(lambda: bool(connections(router)))
    (connection,) = connections(router)
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reset_in_the_middle_of_many_streams_disturbs_no_other(router: Router, stream: bool) -> None:
    script = Script(router.tokens("otter " * 30) + router.tokens("<|im_end|>"), per_delta=1)
    hanging = Script(router.tokens("otter " * 30), hang_after=3)
    router.dispatcher.script = lambda asked, sequence: hanging if asked.prompt_ids == [9] else script
    leaving = [await connect(router) for _ in range(50)]
    staying = [await connect(router) for _ in range(50)]
    for _, writer in leaving:
        writer.write(request(prompt=[9], stream=stream, max_tokens=200))
    for _, writer in staying:
        writer.write(request(max_tokens=200))
    await until(lambda: len(router.dispatcher.handles) == 100)
    for _, writer in leaving:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.close()
    assert await asyncio.gather(*(read_answer(reader) for reader, _ in staying)) == ["otter " * 30] * 50
    gone = [handle for handle in router.dispatcher.handles if handle.request.prompt_ids == [9]]
    await until(lambda: all(handle.cancelled_at is not None for handle in gone))
    for _, writer in staying:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stop": ["mam"]},
        {"logprobs": True},
        {"return_token_ids": True},
        {"min_tokens": 3, "skip_special_tokens": False},
    ],
)
@pytest.mark.parametrize("per_delta", [1, 3])
async def test_a_stream_is_the_same_whether_its_deltas_are_pushed_or_go_through_its_task(
    router: Router, path: str, options: dict[str, Any], per_delta: int
) -> None:
    router.answers("An otter 🦦 is a mammal.", per_delta=per_delta)
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    asked: dict[str, Any] = options | prompt
    if options == {"logprobs": True} and path == "/v1/completions":
        asked["logprobs"] = 1
    answers = []
    for _ in range(2):
        answer = await router.post(path, stream=True, max_tokens=100, **asked)
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
        answers.append([event if event in ("", "[DONE]") else _nameless(event) for event in events])
        router.dispatcher.pushes = False
    assert [handle.num_pushed > 0 for handle in router.dispatcher.handles] == [True, False]
    assert answers[0] == answers[1]


def _nameless(event: str) -> list[tuple[str, Any]]:
    """Its content in its order, without what is another request's."""
    return [(name, value) for name, value in json.loads(event).items() if name not in ("id", "created")]
