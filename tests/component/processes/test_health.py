"""The pages of a process that serves no other HTTP, a worker's health by them, and `kvrelay health`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.worker_registry import RECORD_PAGE
from kvrelay.process import HeldPort
from kvrelay.telemetry.pages import Page, Pages
from kvrelay_router.fleet.watch import StaticWorkers
from tests.fakes.command import command
from tests.fakes.hash_runner import HashRunner
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import LocalWorker

health = command("health")


def broken() -> Page:
    raise RuntimeError("this page breaks")


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    pages = Pages({"/ok": lambda: Page(b"fine\n"), "/broken": broken})
    await pages.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{pages.port}"
    finally:
        await pages.close()


async def test_pages_answer_by_path() -> None:
    async with served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.get("/ok?x=1")
        assert (answer.status_code, answer.text) == (200, "fine\n")
        head = await http.head("/ok")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "5")
        assert (await http.get("/")).status_code == 404
        assert (await http.post("/ok")).status_code == 405
        assert (await http.get("/broken")).status_code == 500
        assert (await http.get("/ok")).status_code == 200


@pytest.mark.parametrize("sent", [b"\r\n\r\n", b"GET /ok\r\n\r\n", b"GET /ok SPDY/3\r\n\r\n", b"\xff\x00 / \r\n\r\n"])
async def test_what_is_no_http_is_refused(sent: bytes) -> None:
    async with served() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_head_without_an_end_is_cut_off() -> None:
    async with served() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /ok HTTP/1.1\r\nx: " + b"x" * 100_000)
        with contextlib.suppress(ConnectionError):  # closed before it had read all
            assert await reader.read() == b""
        writer.close()
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/ok")).status_code == 200


async def test_a_worker_is_ready_between_its_joining_and_its_drain(redis_server: EmbeddedRedis) -> None:
    prefix = f"test-{secrets.token_hex(4)}"
    worker = LocalWorker(
        redis_server.url, "decode", HashRunner(num_blocks=16), redis_prefix=prefix, http_port=0, drain_timeout_s=30
    )
    await worker.shell.startup()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.shell._pages.port}") as http:
        assert (await http.get("/health")).status_code == HTTPStatus.OK
        starting = await http.get("/ready")
        assert (starting.status_code, starting.text) == (503, "starting\n")
        worker._task = asyncio.create_task(worker.shell.main_loop())
        await asyncio.wait_for(worker.started.membership.joined.wait(), PATIENCE_S)
        assert (await http.get("/ready")).text == "ready\n"
        assert await asyncio.to_thread(health, [str(http.base_url.join("/ready"))]) == 0
        worker.started.reports.draining = True
        draining = await http.get("/ready")
        assert (draining.status_code, draining.text) == (503, "draining\n")
        assert await asyncio.to_thread(health, [str(http.base_url.join("/ready"))]) == 1
        assert (await http.get("/health")).status_code == HTTPStatus.OK
        await worker.stop()
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_a_worker_tells_by_its_page_who_it_is_once_it_can_serve() -> None:
    with HeldPort() as held:
        worker = LocalWorker("none", "decode", HashRunner(), worker_id="decode-0", http_port=held.port)
        assert worker.shell._record_page().status == 503
        await worker.start()
        try:
            assert worker.shell._readiness().status == 200
            static = StaticWorkers([f"http://127.0.0.1:{held.port}"], "hash-model", 0.05)
            static.start(lambda: None)
            await until(static.found)
            (found,) = static.found()
            assert found.record is not None
            assert (found.record.worker_id, found.record.role) == ("decode-0", "decode")
            assert (found.record.incarnation, found.record.address) == (worker.me.incarnation, worker.me.address)
            assert RECORD_PAGE == "/worker"
            await static.close()
        finally:
            await worker.stop()


def test_health_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert health(["http://127.0.0.1:1/ready"]) == 1
    assert "http://127.0.0.1:1/ready does not answer (Connection refused)" in capsys.readouterr().err
    for wrong in (["localhost:80"], ["--timeout=0"], ["file:///etc/passwd"]):
        with pytest.raises(SystemExit) as raised:
            health(wrong)
        assert raised.value.code == 2
