"""Redis dies, comes back empty or old, hangs, or fails over, under 200 streams: none fails, and the index heals.

Real router and workers with simulated devices: what every stream must say is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from kvrelay.fleet.embedded import RedisServer
from kvrelay.protocol.sampling import Sampling
from kvrelay.simulated.simulated_model import continuation, read_facts
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.redis_servers import ONLY_WHEN_TOLD, Sentinel
from tests.fakes.stack import Stack

pytestmark = pytest.mark.timeout(400)

NUM_STREAMS = 200
MAX_TOKENS = 60
PAUSE_S = 10.0
HEALS_WITHIN_S = 120.0
PROFILE = {
    "name": "quick",
    "fixed_s": 0.004,
    "token_s": 1e-5,
    "pair_s": 0.0,
    "kv_bytes_per_token": 1000,
    "kv_tokens": 16 * 4096,
    "transfer_bytes_s": 1e9,
}
PARAMETERS = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
VOCABULARY = read_facts(str(DEMO_MODEL)).vocabulary
Fault = Callable[["Servers"], Awaitable[None]]


class Servers:
    """A Redis with its data on disk, where a test wants it; a replica and a sentinel, where it asks for them."""

    def __init__(self, directory: Path, *, is_watched: bool) -> None:
        self.primary = self._start(directory / "primary")
        self.url = self.primary.url
        self._others: list[RedisServer] = []
        if is_watched:
            self._others.append(self._start(directory / "replica", f"replicaof 127.0.0.1 {self.primary.port}"))
            sentinel = directory / "sentinel"
            sentinel.mkdir()
            watching = Sentinel(sentinel, self.primary.port)
            self._others.append(watching)
            self.url = f"redis+sentinel://127.0.0.1:{watching.port}/main"
            with redis.Redis(port=watching.port, decode_responses=True) as client:
                while int(client.sentinel_master("main")["num-slaves"]) < 1:
                    time.sleep(0.05)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.primary.url)

    def close(self) -> None:
        for server in (*self._others, self.primary):
            server.close()

    @staticmethod
    def _start(directory: Path, settings: str = "") -> RedisServer:
        directory.mkdir()
        return RedisServer(directory, f"{ONLY_WHEN_TOLD}\nmaxmemory-policy noeviction\n{settings}")


async def killed_and_empty(servers: Servers) -> None:
    servers.primary.kill()
    await asyncio.sleep(2.0)
    await asyncio.to_thread(servers.primary.restart)


async def killed_and_old(servers: Servers) -> None:
    """What is on disk is older than what workers have published and routers have read."""
    with servers.client() as client:
        client.save()
    await asyncio.sleep(2.0)
    servers.primary.kill()
    await asyncio.to_thread(servers.primary.restart)


async def emptied(servers: Servers) -> None:
    with servers.client() as client:
        client.flushall()


async def paused(servers: Servers) -> None:
    os.kill(servers.primary.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(PAUSE_S)
    finally:
        os.kill(servers.primary.pid, signal.SIGCONT)


async def failed_over(servers: Servers) -> None:
    """The replica becomes the primary; the old one does not come back."""
    servers.primary.kill()


@pytest.mark.parametrize("fault", [killed_and_empty, killed_and_old, emptied, paused, failed_over])
def test_no_stream_notices(tmp_path: Path, fault: Fault) -> None:
    servers = Servers(tmp_path, is_watched=fault is failed_over)
    profile = tmp_path / "quick.json"
    profile.write_text(json.dumps(PROFILE))
    fleet = ("--prefill", "6", "--decode", "6", "--num-workers", "6", "--peer-timeout-s", "60")
    device = ("--backend", "simulated", "--profile", str(profile))
    try:
        with Stack(DEMO_MODEL, tmp_path / "state", "--redis", servers.url, *fleet, *device) as stack:
            asyncio.run(disturbed(stack, servers, fault))
            requests = stack.fleet()["requests"]
            assert not requests["failed"] and not requests["timed_out"], requests
            stack.wait_until_clean()
    finally:
        servers.close()


async def disturbed(stack: Stack, servers: Servers, fault: Fault) -> None:
    """Each client asks again and again until the index is whole again; a request before, one in, and one after it."""
    async with clients(stack) as (begun, whole):
        await begun.wait()
        was = stack.fleet()
        await fault(servers)
        await until_healed(stack, was)
        whole.set()
    await until_whole(stack)


@asynccontextmanager
async def clients(stack: Stack) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """`begun`: all of them have had a first answer. They end with the request after `whole`."""
    begun, whole = asyncio.Event(), asyncio.Event()
    num_begun = 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_STREAMS)

    async def one(http: httpx.AsyncClient, number: int) -> None:
        nonlocal num_begun
        rng, last = random.Random(number), False
        family = random.Random(number % 8).choices(range(3, 2048), k=320)
        for turn in range(1 << 20):
            prompt = family[: rng.choice([0, 64, 320])] + rng.choices(range(3, 2048), k=rng.randint(1, 200))
            assert await streamed(http, stack.model, prompt) == expected(prompt), (number, turn)
            num_begun += not turn
            if num_begun == NUM_STREAMS:
                begun.set()
            if last:
                return
            last = whole.is_set()

    async with httpx.AsyncClient(base_url=stack.base_url, timeout=200, limits=limits) as http:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_STREAMS):
                    group.create_task(one(http, number))
                yield begun, whole
        finally:
            begun.set()


async def streamed(http: httpx.AsyncClient, model: str, prompt: list[int]) -> list[int]:
    """A stream's tokens; it must end as streams do."""
    token_ids: list[int] = []
    last = ""
    body = {"model": model, "prompt": prompt, "stream": True, "return_token_ids": True} | PARAMETERS
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += [token for choice in choices for token in choice["token_ids"]]
            last = line or last
    assert last == "data: [DONE]"
    return token_ids


def expected(prompt: list[int]) -> list[int]:
    return continuation(prompt, Sampling(**PARAMETERS), VOCABULARY, 8192, 0)  # type: ignore[arg-type]


async def until_healed(stack: Stack, was: dict[str, Any]) -> None:
    """Under load: registry and index answer again, and every worker has told the index of something since."""
    told = index_totals(was, "index_batches")
    async with asyncio.timeout(HEALS_WITHIN_S):
        while True:
            fleet = await asyncio.to_thread(stack.fleet)
            now = index_totals(fleet, "index_batches")
            index = fleet["prefix_index"]
            if (
                fleet["router"]["registry"] == "ok"
                and index["state"] == "current"
                and index["ranges"] == len(told)
                and all(now[name] > count for name, count in told.items())
            ):
                return
            await asyncio.sleep(0.1)


async def until_whole(stack: Stack) -> None:
    """At rest: the router's copy holds as many blocks as the workers' caches do, worker by worker in sum."""
    async with asyncio.timeout(HEALS_WITHIN_S):
        while True:
            fleet = await asyncio.to_thread(stack.fleet)
            index, cached = fleet["prefix_index"], sum(worker["blocks"]["cached"] for worker in fleet["workers"])
            assert cached
            if index["held"] == cached and index["retired_ranges"] == 0 and index["state"] == "current":
                return
            await asyncio.sleep(0.1)


def index_totals(fleet: dict[str, Any], name: str) -> dict[str, float]:
    return {worker["worker_id"]: worker["totals"][name] for worker in fleet["workers"]}
