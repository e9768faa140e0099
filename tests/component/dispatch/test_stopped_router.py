"""A router that stands still for longer than peers may be silent: neither side concludes that the other is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import psutil

from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.protocol.messages import Cancel, Reserve
from tests.component.dispatch.fake_workers import FAST, FakeDecode, FakePrefill
from tests.component.dispatch.test_server import RouterProcess, registered, running
from tests.fakes.waiting import PATIENCE_S, until

PEER_TIMEOUT_S = 3.0
PATIENT = replace(FAST, peer_timeout_s=PEER_TIMEOUT_S, router_timeout_s=120.0)
FLAGS = ("--router-id", "router", f"--peer-timeout-s={PEER_TIMEOUT_S}")
NUM_STREAMS = 4


class OpenStream:
    """A completion of whose tokens the decode worker holds some back."""

    def __init__(self, router: RouterProcess, max_tokens: int) -> None:
        body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": max_tokens, "stream": True}
        self.started = asyncio.Event()
        self.task = asyncio.create_task(self._read(str(router.client.base_url), body))

    async def _read(self, url: str, body: dict[str, Any]) -> list[str]:
        async with (
            httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            self.started.set()
            return [line async for line in answer.aiter_lines() if line]


def is_complete(events: list[str]) -> bool:
    *chunks, done = events
    reasons = [json.loads(chunk.removeprefix("data: "))["choices"][0]["finish_reason"] for chunk in chunks]
    return done == "data: [DONE]" and reasons[-1] == "length"


@asynccontextmanager
async def patient_fleet(redis_url: str, name: str) -> AsyncIterator[tuple[RouterProcess, FakePrefill, FakeDecode]]:
    """A router process and two workers, ready."""
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    async with registered(redis_url, name, prefill, decode), running(redis_url, name, *FLAGS) as router:
        await router.ready({"prefill": 1, "decode": 1})
        yield router, prefill, decode


async def test_streams_go_on_after_their_router_was_stopped(redis_server: EmbeddedRedis) -> None:
    async with patient_fleet(redis_server.url, "stopped") as (router, prefill, decode):
        gate = decode.hold("token 3")
        streams = [OpenStream(router, max_tokens=8) for _ in range(NUM_STREAMS)]
        await asyncio.wait_for(asyncio.gather(*(stream.started.wait() for stream in streams)), PATIENCE_S)
        await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
        process = psutil.Process(router.process.pid)
        process.suspend()
        (peer,) = {body.router for _, body in decode.got(Reserve) if isinstance(body, Reserve)}
        await until(lambda: decode.messenger.silent_s(peer) > 1.5 * PEER_TIMEOUT_S)
        gate.open.set()  # tokens pile up for the stopped router
        await until(lambda: not decode.tasks)
        assert decode.messenger.silent_s(peer) > 1.5 * PEER_TIMEOUT_S
        process.resume()
        for stream in streams:
            assert is_complete(await asyncio.wait_for(stream.task, PATIENCE_S))
        assert prefill.lost == decode.lost == []
        assert not decode.got(Cancel) and not prefill.got(Cancel)
        requests = (await router.client.get("/fleet")).json()["requests"]
        assert (requests["retries"], requests["failed"], requests["finished"]) == (0, 0, NUM_STREAMS)


async def test_a_router_that_has_ended_is_lost_at_once(redis_server: EmbeddedRedis) -> None:
    async with patient_fleet(redis_server.url, "ended") as (router, prefill, decode):
        gate = decode.hold("token 3")
        stream = OpenStream(router, max_tokens=8)
        await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
        router.process.kill()
        await until(lambda: bool(decode.lost and prefill.lost))
        assert f"{PEER_TIMEOUT_S:g} s" in decode.lost[0].reason
        await asyncio.gather(stream.task, return_exceptions=True)
