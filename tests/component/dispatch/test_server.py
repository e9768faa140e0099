"""The router's process: found workers, served streams, and an orderly end, whatever still runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrelay.config import RouterConfig
from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet import Registry
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.key_limits import SharedLimits
from kvrelay.process import HeldPort
from kvrelay.text.service import TextService
from kvrelay_router.server import RouterServer
from tests.component.dispatch.fake_workers import PATIENT, FakeDecode, FakePrefill, FakeWorker
from tests.fakes.waiting import PATIENCE_S


class RouterProcess:
    """A router of its own, with a client for it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)

    async def ready(self, workers: dict[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer = await self.client.get("/ready")
                    if answer.status_code == 200 and answer.json()["workers"] == workers:
                        return
                except httpx.TransportError:
                    assert self.process.returncode is None
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def stream(self, max_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": max_tokens, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-kvrelay-prefill"] == "p0"
            yield answer.aiter_lines()

    async def draining(self) -> None:
        """Until it takes no new requests: it says so, or does not listen any more."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while (await self.client.get("/ready")).status_code == 200:
                    await asyncio.sleep(0.05)
            except httpx.TransportError:
                return

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def running(redis_url: str, prefix: str, *flags: str, stderr: int | None = None) -> AsyncIterator[RouterProcess]:
    held = HeldPort()
    environ = {**os.environ, "KVRELAY_REDIS_URL": redis_url, "KVRELAY_REDIS_PREFIX": prefix}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay_router", "--port", str(held.port), *flags, env=environ, stderr=stderr
    )
    router = RouterProcess(process, held.port)
    try:
        yield router
    finally:
        await router.client.aclose()
        if process.returncode is None:
            process.kill()
            await process.wait()
        held.release()


@asynccontextmanager
async def registered(redis_url: str, prefix: str, *workers: FakeWorker, ttl_s: float = 120) -> AsyncIterator[None]:
    registry = Registry(redis_url, prefix)
    for worker in workers:
        worker.model = DEMO_MODEL_NAME
        worker.start()
        await registry.join(worker.record, ttl_s)
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
        await registry.close()


async def until_refused(host: str, port: int | None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # it was about to be taken when the port was closed
                continue
            writer.close()
            await asyncio.sleep(0.01)


async def test_running_streams_finish_after_sigterm(redis_server: EmbeddedRedis) -> None:
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    gate = decode.hold("token 3")
    async with (
        registered(redis_server.url, "finish", prefill, decode),
        running(redis_server.url, "finish") as router,
    ):
        await router.ready({"prefill": 1, "decode": 1})
        async with router.stream(max_tokens=6) as lines:
            await gate.reached.wait()
            router.process.send_signal(signal.SIGTERM)
            await router.draining()
            assert router.process.returncode is None
            gate.open.set()
            events = [line async for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(events)
        assert await router.exit_status() == 0


async def test_what_comes_on_open_connections_after_sigterm_is_answered(redis_server: EmbeddedRedis) -> None:
    """A request whose body is on its way when the port is closed already."""
    async with (
        registered(redis_server.url, "late", FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)),
        running(redis_server.url, "late", "--drain-timeout-s", "600") as router,
    ):
        await router.ready({"prefill": 1, "decode": 1})
        url = router.client.base_url
        body = json.dumps({"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 6}).encode()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # it is being read
        router.process.send_signal(signal.SIGTERM)
        await until_refused(url.host, url.port)
        writer.write(body)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b'"finish_reason":"length"' in answer
        writer.close()
        assert await router.exit_status() == 0


async def test_whoever_connects_first_finds_a_router_that_knows_its_workers(redis_server: EmbeddedRedis) -> None:
    async with (
        registered(redis_server.url, "first", FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)),
        running(redis_server.url, "first", "--peer-timeout-s", "600") as router,
        asyncio.timeout(PATIENCE_S),
    ):
        while True:
            try:
                body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 6}
                answer = await router.client.post("/v1/completions", json=body)
                break
            except httpx.ConnectError:
                assert router.process.returncode is None
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("end", ["drain timeout", "second signal"])
async def test_streams_that_do_not_finish_end_with_an_error_event(redis_server: EmbeddedRedis, end: str) -> None:
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    gate = decode.hold("token 3")
    timeout_s = "0.5" if end == "drain timeout" else "60"
    prefix = end.replace(" ", "-")
    async with (
        registered(redis_server.url, prefix, prefill, decode),
        running(redis_server.url, prefix, "--drain-timeout-s", timeout_s) as router,
    ):
        await router.ready({"prefill": 1, "decode": 1})
        async with router.stream(max_tokens=6) as lines:
            await gate.reached.wait()
            router.process.send_signal(signal.SIGTERM)
            if end == "second signal":
                await router.draining()
                router.process.send_signal(signal.SIGINT)
            events = [line async for line in lines if line]
        assert "shutting down" in events[-2]
        assert events[-1] == "data: [DONE]"
        assert await router.exit_status() == 0
        assert not decode.tasks


async def test_a_router_lives_without_a_registry_and_says_that_nobody_is_ready() -> None:
    async with running("redis://127.0.0.1:1/0", "none") as router:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer = await router.client.get("/ready")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        assert answer.status_code == 503
        router.process.send_signal(signal.SIGTERM)
        assert await router.exit_status() == 0


async def test_a_bad_flag_is_named_on_standard_error() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay_router", "--max-attempts", "0", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"--max-attempts" in errors


async def test_a_close_that_raises_keeps_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def fail(self: SharedLimits) -> None:
        raise ConnectionResetError("it was in the middle of something")

    async def note_registry(self: Registry) -> None:
        closed.append("registry")

    def note_text(self: TextService) -> None:
        closed.append("text")

    monkeypatch.setattr(SharedLimits, "close", fail)
    monkeypatch.setattr(Registry, "close", note_registry)
    monkeypatch.setattr(TextService, "close", note_text)
    server = RouterServer(RouterConfig(port=0, redis_url="redis://127.0.0.1:1/0"))
    await server.startup()
    assert server._http is not None
    (fleet,) = server._fleets
    with pytest.raises(ConnectionResetError):
        await server.shutdown()
    assert closed == ["registry", "text"]
    assert fleet.dispatcher._is_closed
    await server._http.wait()
