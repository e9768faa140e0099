"""Unfinished bodies and requests in progress: their sum is bounded, and nothing of it remains after a flood."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay_router.http.body import PendingMemory
from tests.component.router.http.test_connection_limits import refusal
from tests.component.router.http.test_streams_under_load import connect, connections, read_answer, request
from tests.component.router.rig import MODEL
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.waiting import until

LIMIT = 1 << 20


def upload(num_bytes: int, *, chunked: bool) -> bytes:
    """The head of a request and the first bytes of its body, which does not end."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    body = b'{"prompt": "' + b"a" * (num_bytes - 12)
    if chunked:
        return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % num_bytes + body + b"\r\n"
    return head + b"content-length: %d\r\n\r\n" % (num_bytes + 100) + body


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_flood_of_unfinished_bodies_is_refused_and_leaves_nothing(
    make_router: Callable[..., Any], chunked: bool
) -> None:
    memory = PendingMemory(LIMIT)
    async with make_router(memory=memory) as router:
        ends = []
        for _ in range(10):
            ends.append(await connect(router))
            ends[-1][1].write(upload(100_000, chunked=chunked))
        await until(lambda: memory.bodies_bytes == 1_000_000)
        reader, writer = await connect(router)
        writer.write(upload(100_000, chunked=chunked))
        status, error = await refusal(reader)
        assert (status, error["code"]) == (503, "too_many_pending_bytes")
        assert str(LIMIT) in error["message"]
        writer.close()
        assert memory.num_refused >= 1
        shown = (await router.http.get("/fleet")).json()["memory"]
        assert (shown["limit_bytes"], shown["requests_bytes"]) == (LIMIT, 0) and shown["bodies_bytes"] >= 1_000_000
        for _, each in ends[:5]:
            each.transport.abort()
        await until(lambda: memory.bodies_bytes == 500_000)
        reader, writer = await connect(router)
        writer.write(request())
        assert await read_answer(reader) == "An otter is a mammal.", "there is room again"
        for _, each in (*ends, (reader, writer)):
            each.close()
        await until(lambda: memory.bodies_bytes == 0)
    assert (memory.bodies_bytes, memory.requests_bytes) == (0, 0)


async def test_a_body_counts_as_it_arrives_and_until_its_request_runs(make_router: Callable[..., Any]) -> None:
    memory, going_on = PendingMemory(), asyncio.Event()
    async with make_router(memory=memory) as router:
        script = Script(router.tokens("otter"), hang_after=1, resume=going_on)
        router.dispatcher.script = lambda asked, sequence: script
        reader, writer = await connect(router)
        data = request(prompt="x", padding="a" * 50_000)
        writer.write(data[:30_000])
        await until(lambda: 29_000 < memory.bodies_bytes < 30_000)
        writer.write(data[30_000:])
        await until(lambda: bool(router.dispatcher.handles))
        assert memory.bodies_bytes == 0 and memory.requests_bytes > 0
        going_on.set()
        await read_answer(reader)
        await until(lambda: memory.requests_bytes == 0)
        writer.close()


async def test_queued_requests_are_bounded_by_their_bytes(make_router: Callable[..., Any]) -> None:
    memory = PendingMemory(LIMIT)
    async with make_router(memory=memory) as router:
        router.dispatcher.script = lambda asked, sequence: Script([5], hang_after=0)
        body = {"model": MODEL, "prompt": [9] * 400, "max_tokens": 4, "prompt_logprobs": 5}
        posts = [asyncio.create_task(router.http.post("/v1/completions", json=body)) for _ in range(10)]
        done, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            answer = each.result()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_pending_bytes"
            assert answer.headers["retry-after"] == "1"
        assert 0 < memory.requests_bytes <= LIMIT
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        await until(lambda: not memory.requests_bytes and not memory.bodies_bytes)


async def test_pipelined_requests_leave_no_bytes_behind(make_router: Callable[..., Any]) -> None:
    memory = PendingMemory()
    async with make_router(memory=memory) as router:
        reader, writer = await connect(router)
        writer.write(request() * 6)
        for _ in range(6):
            assert await read_answer(reader) == "An otter is a mammal."
        await until(lambda: not memory.bodies_bytes and not memory.requests_bytes)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n" + json.dumps({"a": 1}).encode()
        )
        await until(lambda: memory.bodies_bytes > 0)
        writer.close()
        await until(lambda: not connections(router))
        assert memory.bodies_bytes == 0


def num_requests() -> int:
    """How many requests this process has in memory."""
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


async def test_an_aborted_upload_is_freed_without_the_garbage_collector(make_router: Callable[..., Any]) -> None:
    memory = PendingMemory()
    async with make_router(memory=memory) as router:
        gc.collect()
        gc.disable()
        try:
            before = num_requests()  # those of other routers' open connections
            _, writer = await connect(router)
            writer.write(upload(10_000, chunked=False))
            await until(lambda: memory.bodies_bytes == 10_000)
            writer.transport.abort()
            await until(lambda: not memory.bodies_bytes and not connections(router))
            await until(lambda: num_requests() <= before)
        finally:
            gc.enable()
