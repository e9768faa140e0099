"""Thousands of streams to which no token comes: what each costs the router, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import dataclass

import httpx
import psutil
import pytest

from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import allow_open_files
from kvrelay.protocol.link import LinkSettings
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill
from tests.component.dispatch.test_server import RouterProcess, registered, running
from tests.fakes.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STREAMS = 10_000
NUM_STARTING = 64
MAX_BYTES_PER_STREAM = 64 << 10
FLAGS = ("--max-queued-requests", str(NUM_STREAMS + 100))
LASTING = LinkSettings(alive_interval_s=2.0, peer_timeout_s=120.0)
PATIENT = ("--peer-timeout-s", "120", "--request-timeout-s", "900")


@dataclass
class IdleStream:
    """A stream that has begun."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self) -> bytes:
        try:
            return await self.reader.readuntil(b"data: [DONE]")
        finally:
            self.writer.close()


async def begin(router: RouterProcess, starting: asyncio.Semaphore) -> IdleStream:
    url = router.client.base_url
    body = json.dumps({"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 9, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    async with starting:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        await reader.readuntil(b"data: ")
    return IdleStream(reader, writer)


async def served(router: RouterProcess) -> httpx.Response:
    body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 3}
    return (await router.client.post("/v1/completions", json=body)).raise_for_status()


async def test_idle_streams_cost_little_and_delay_nobody(redis_server: EmbeddedRedis) -> None:
    allow_open_files(None)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_STREAMS + 1000:
        pytest.skip(f"needs {NUM_STREAMS + 1000} open files")
    prefill, decode = FakePrefill("p0", settings=LASTING), FakeDecode("d0", settings=LASTING)
    gate = decode.hold("token 3")
    async with (
        registered(redis_server.url, "idle", prefill, decode, ttl_s=600),
        running(redis_server.url, "idle", *FLAGS, *PATIENT) as router,
    ):
        await router.ready({"prefill": 1, "decode": 1})
        await served(router)
        process = psutil.Process(router.process.pid)
        rss_before = process.memory_info().rss
        starting = asyncio.Semaphore(NUM_STARTING)
        streams = await asyncio.gather(*(begin(router, starting) for _ in range(NUM_STREAMS)))
        await until(gate.reached.is_set)
        per_stream = (process.memory_info().rss - rss_before) / NUM_STREAMS
        for _ in range(10):
            assert (await served(router)).json()["usage"]["completion_tokens"] == 3
        gate.open.set()
        assert all(end.endswith(b"[DONE]") for end in await asyncio.gather(*(stream.rest() for stream in streams)))
        print(f"{NUM_STREAMS} idle streams: {per_stream / 1024:.1f} KiB each")
        assert per_stream < MAX_BYTES_PER_STREAM
        router.process.terminate()
        assert await router.exit_status() == 0
