"""The memory of a router process under slowly dripped bodies and queued prompts: bounded by `max_pending_bytes`."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import allow_open_files
from kvrelay.protocol.link import LinkSettings
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill
from tests.component.dispatch.test_server import RouterProcess, registered, running
from tests.fakes.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 64 << 20
NUM_CONNECTIONS = 3000
NUM_STARTING = 64
PIECE = b"a" * 4096
NUM_PIECES = 8  # of each body; all together take half more than the limit
NUM_FLOODS = 3
MAX_BYTES_PER_CONNECTION = 48 << 10
MAX_FACTOR = 1.5
"""How much memory a byte of the limit may take."""
NUM_PROMPT_TOKENS = 20_000
LASTING = LinkSettings(alive_interval_s=2.0, peer_timeout_s=120.0)
FLAGS: tuple[str, ...] = (
    "--max-pending-bytes",
    str(LIMIT),
    "--max-queued-requests",
    "4000",
    "--peer-timeout-s",
    "120",
)


class Measured:
    """A router process, its own count of bytes, and its resident memory."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self._process = psutil.Process(router.process.pid)
        self._peak = 0

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = (await self.router.client.get("/fleet")).json()["memory"]
        assert counts["bodies_bytes"] + counts["requests_bytes"] <= LIMIT
        self._peak = max(self._peak, self.rss)
        return counts

    @property
    def rss(self) -> int:
        return int(self._process.memory_info().rss)

    def peak(self) -> int:
        """The highest resident memory that `counts` saw since the last call."""
        peak, self._peak = self._peak, 0
        return peak

    async def until_counts(self, **wanted: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not wanted.items() <= (await self.counts()).items():
                await asyncio.sleep(0.05)


@asynccontextmanager
async def dripping(router: RouterProcess, starting: asyncio.Semaphore) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Connections with the heads of requests whose bodies do not end."""
    url, head = router.client.base_url, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"

    async def connect() -> asyncio.StreamWriter:
        async with starting:
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head)
            return writer

    writers = await asyncio.gather(*(connect() for _ in range(NUM_CONNECTIONS)))
    try:
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def measured(redis_url: str, name: str) -> AsyncIterator[tuple[Measured, FakeDecode]]:
    allow_open_files(None)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_CONNECTIONS + 1000:
        pytest.skip(f"needs {NUM_CONNECTIONS + 1000} open files")
    prefill = FakePrefill("p0", settings=LASTING, max_model_len=30_000)
    decode = FakeDecode("d0", settings=LASTING, max_model_len=30_000)
    async with registered(redis_url, name, prefill, decode, ttl_s=600), running(redis_url, name, *FLAGS) as router:
        await router.ready({"prefill": 1, "decode": 1})
        (await complete(router)).raise_for_status()
        yield Measured(router), decode


async def complete(router: RouterProcess, num_tokens: int = 5) -> Any:
    body = {"model": DEMO_MODEL_NAME, "prompt": [9] * num_tokens, "max_tokens": 4}
    return await router.client.post("/v1/completions", content=json.dumps(body), timeout=4 * PATIENCE_S)


async def test_dripped_bodies_take_no_more_than_the_limit_and_give_it_back(redis_server: EmbeddedRedis) -> None:
    async with measured(redis_server.url, "dripped") as (process, _):
        before, peaks = process.rss, []
        for _ in range(NUM_FLOODS):
            num_refused = (await process.counts())["refused"]
            async with dripping(process.router, asyncio.Semaphore(NUM_STARTING)) as writers:
                for _ in range(NUM_PIECES):
                    for writer in writers:
                        writer.write(PIECE)
                    await process.counts()
                async with asyncio.timeout(PATIENCE_S):
                    while (await process.counts())["refused"] == num_refused:
                        await asyncio.sleep(0.05)
            await process.until_counts(bodies_bytes=0, requests_bytes=0)
            (await complete(process.router)).raise_for_status()
            peaks.append(process.peak())
        after = process.rss
        mib = [round((value - before) / 2**20, 1) for value in (*peaks, after)]
        print(f"peaks above {before / 2**20:.0f} MiB, and afterwards, of {LIMIT >> 20} MiB: {mib} MiB")
        most = MAX_FACTOR * LIMIT + NUM_CONNECTIONS * MAX_BYTES_PER_CONNECTION
        assert max(peaks) - before < most


async def test_queued_prompts_take_no_more_than_the_limit_and_give_it_back(redis_server: EmbeddedRedis) -> None:
    async with measured(redis_server.url, "queued") as (process, decode):
        before, gate = process.rss, decode.hold("token 1")
        posts = [asyncio.create_task(complete(process.router, NUM_PROMPT_TOKENS)) for _ in range(400)]
        done, waiting = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result().status_code for each in done} == {503}
        counts = await process.counts()
        while waiting and counts["requests_bytes"] < LIMIT * 0.9:
            counts = await process.counts()
            await asyncio.sleep(0.05)
        peak = process.peak()
        gate.open.set()
        answers = Counter([answer.status_code for answer in await asyncio.gather(*posts)])
        await process.until_counts(bodies_bytes=0, requests_bytes=0)
        mib = [round((value - before) / 2**20, 1) for value in (peak, process.rss)]
        print(f"{answers}: peak above {before / 2**20:.0f} MiB, and afterwards, of {LIMIT >> 20} MiB: {mib} MiB")
        assert answers.keys() == {200, 503} and peak - before < MAX_FACTOR * LIMIT
