"""Several router processes behind one port: they share it, die alone, are started again, and drain together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from kvrelay.config.demo import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.component.dispatch.fake_workers import PATIENT, FakeDecode, FakePrefill
from tests.component.dispatch.test_server import RouterProcess, registered, running
from tests.fakes.waiting import PATIENCE_S

NUM_PROCESSES = 3
NAMES = {f"router-{number}" for number in range(NUM_PROCESSES)}
FLAGS = ("--processes", str(NUM_PROCESSES), "--router-id", "router")


async def ask(router: RouterProcess, path: str) -> httpx.Response:
    """On a connection of its own, which any process may take."""
    async with httpx.AsyncClient(base_url=router.client.base_url, timeout=2 * PATIENCE_S) as client:
        return await client.get(path)


async def answering(router: RouterProcess) -> dict[str, dict[str, Any]]:
    """What each process says of itself, once all have answered with both workers ready."""
    found: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while set(found) != NAMES:
            answers = await asyncio.gather(*(ask(router, "/fleet") for _ in range(16)), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    assert isinstance(answer, httpx.TransportError), answer
                    continue
                fleet = answer.json()
                assert answer.headers["x-kvrelay-router"] == fleet["router"]["router_id"]
                if Counter(each["state"] for each in fleet["workers"]) == {"ready": 2}:
                    found[fleet["router"]["router_id"]] = fleet["router"]
    return found


class OpenStream:
    """A completion of whose tokens the decode worker holds some back."""

    def __init__(self, router: RouterProcess, max_tokens: int) -> None:
        self.served_by = asyncio.get_running_loop().create_future()
        body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": max_tokens, "stream": True}
        self.task = asyncio.create_task(self._read(str(router.client.base_url), body))

    async def _read(self, url: str, body: dict[str, Any]) -> list[str]:
        async with (
            httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            self.served_by.set_result(answer.headers["x-kvrelay-router"])
            return [line async for line in answer.aiter_lines() if line]


async def open_streams(router: RouterProcess, max_tokens: int) -> list[OpenStream]:
    """At least one through every process."""
    streams: list[OpenStream] = []
    async with asyncio.timeout(PATIENCE_S):
        while {stream.served_by.result() for stream in streams} != NAMES:
            more = [OpenStream(router, max_tokens) for _ in range(6)]
            await asyncio.gather(*(stream.served_by for stream in more))
            streams += more
    return streams


def is_complete(events: list[str]) -> bool:
    *chunks, done = events
    reasons = [json.loads(chunk.removeprefix("data: "))["choices"][0]["finish_reason"] for chunk in chunks]
    return done == "data: [DONE]" and reasons[-1] == "length"


@pytest.mark.slow
async def test_a_killed_process_takes_only_its_own_streams_with_it_and_is_started_again(
    redis_server: EmbeddedRedis,
) -> None:
    prefill, decode = FakePrefill("p0"), FakeDecode("d0")
    gate = decode.hold("token 3")
    async with (
        registered(redis_server.url, "killed", prefill, decode),
        running(redis_server.url, "killed", *FLAGS) as router,
    ):
        before = await answering(router)
        streams = await open_streams(router, max_tokens=6)
        psutil.Process(before["router-1"]["process_id"]).kill()
        lost = [stream for stream in streams if stream.served_by.result() == "router-1"]
        kept = [stream for stream in streams if stream not in lost]
        for ended in await asyncio.gather(*(stream.task for stream in lost), return_exceptions=True):
            assert isinstance(ended, httpx.TransportError)
        gate.open.set()
        assert all(map(is_complete, await asyncio.gather(*(stream.task for stream in kept))))
        after = await answering(router)
        assert after["router-1"]["incarnation"] != before["router-1"]["incarnation"]
        assert after["router-0"] == before["router-0"] and after["router-2"] == before["router-2"]
        async with asyncio.timeout(PATIENCE_S):
            while decode.tasks or prefill.tasks:
                await asyncio.sleep(0.01)
        router.process.send_signal(signal.SIGTERM)
        assert await router.exit_status() == 0


class Held:
    """A connection that is kept, with a request on it whose answer names the process that has it."""

    def __init__(self, router: RouterProcess) -> None:
        self._url = router.client.base_url
        self.served_by: asyncio.Task[str] = asyncio.create_task(self._ask())

    async def _ask(self) -> str:
        reader, self._writer = await asyncio.open_connection(self._url.host, self._url.port)
        self._writer.write(b"GET /health HTTP/1.1\r\nhost: router\r\n\r\n")
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        assert status.split()[1] == "200"
        (name,) = [each.split()[1] for each in headers if each.startswith("x-kvrelay-router:")]
        return name

    async def close(self) -> None:
        self.served_by.cancel()
        await asyncio.gather(self.served_by, return_exceptions=True)
        self._writer.close()


async def hold(router: RouterProcess, number: int) -> list[Held]:
    held = [Held(router) for _ in range(number)]
    await asyncio.wait_for(asyncio.gather(*(each.served_by for each in held)), PATIENCE_S)
    return held


def shares(held: list[Held]) -> Counter[str]:
    return Counter(dict.fromkeys(NAMES, 0)) + Counter(each.served_by.result() for each in held)


async def hold_equally_many(router: RouterProcess) -> list[Held]:
    """At every process, once all of them serve. These are the only connections that there have been, so they are shared
    as exactly as those that come next; to be kept, or they are closed.
    """
    async with asyncio.timeout(PATIENCE_S):
        while router.process.returncode is None:
            try:
                held = await hold(router, 1)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
        while set(shares(held)) != NAMES:
            held += await hold(router, 1)
            await asyncio.sleep(0.05)
    return held + await hold(router, NUM_PROCESSES * max(shares(held).values()) - len(held))


async def test_connections_that_come_at_once_are_shared_equally() -> None:
    async with running("redis://127.0.0.1:1/0", "none", *FLAGS) as router:
        held = await hold_equally_many(router)
        more = await hold(router, 20 * NUM_PROCESSES)
        assert shares(more) == dict.fromkeys(NAMES, 20)
        assert len(set(shares(held).values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_connections_that_wait_for_a_process_that_ends_are_served(number: signal.Signals) -> None:
    async with running("redis://127.0.0.1:1/0", "none", *FLAGS) as router:
        held = await hold_equally_many(router)
        process = await process_of(router, "router-1")
        process.suspend()
        async with asyncio.timeout(PATIENCE_S):
            while process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        more = [Held(router) for _ in range(10 * NUM_PROCESSES)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(each.served_by.done() for each in more) < 10 * (NUM_PROCESSES - 1):
                await asyncio.sleep(0.01)
        waiting = [each for each in more if not each.served_by.done()]
        assert len(waiting) == 10
        process.send_signal(number)
        process.resume()
        await asyncio.wait_for(asyncio.gather(*(each.served_by for each in waiting)), PATIENCE_S)
        assert len(set(shares(held).values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_client_is_refused_while_processes_end_one_after_the_other(number: signal.Signals) -> None:
    async with running("redis://127.0.0.1:1/0", "none", *FLAGS) as router:
        await hold_equally_many(router)
        done = asyncio.Event()
        num_answers = 0

        async def clients() -> None:
            nonlocal num_answers
            while not done.is_set():
                connection = Held(router)
                try:
                    await asyncio.wait_for(connection.served_by, PATIENCE_S)
                    num_answers += 1
                except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError):
                    pass  # a process had taken it, and ended
                await connection.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(clients())
            for name in sorted(NAMES):
                process = await process_of(router, name)
                process.send_signal(number)
                async with asyncio.timeout(PATIENCE_S):
                    while (await process_of(router, name)).pid == process.pid:
                        await asyncio.sleep(0.05)
            done.set()
        assert num_answers


async def process_of(router: RouterProcess, name: str) -> psutil.Process:
    """Once there is one that lives."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for child in psutil.Process(router.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if f"--router-id={name}" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        return child
            await asyncio.sleep(0.05)


async def test_sigterm_drains_all_processes_and_lets_nobody_new_in(redis_server: EmbeddedRedis) -> None:
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    gate = decode.hold("token 3")
    async with (
        registered(redis_server.url, "drained", prefill, decode),
        running(redis_server.url, "drained", *FLAGS, "--drain-timeout-s", "120") as router,
    ):
        family = [each["process_id"] for each in (await answering(router)).values()]
        streams = await open_streams(router, max_tokens=6)
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await ask(router, "/health")
                except httpx.TransportError:
                    break
                await asyncio.sleep(0.02)
        assert not any(stream.task.done() for stream in streams)
        assert all(psutil.pid_exists(process_id) for process_id in family)
        gate.open.set()
        assert all(map(is_complete, await asyncio.gather(*(stream.task for stream in streams))))
        assert await router.exit_status() == 0
        assert not any(psutil.pid_exists(process_id) for process_id in family)


async def test_a_second_signal_ends_the_drain_with_error_events(redis_server: EmbeddedRedis) -> None:
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    decode.hold("token 3")
    async with (
        registered(redis_server.url, "hurried", prefill, decode),
        running(redis_server.url, "hurried", *FLAGS, "--drain-timeout-s", "120") as router,
    ):
        await answering(router)
        streams = await open_streams(router, max_tokens=6)
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while not all(stream.task.done() for stream in streams):
                router.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
        for stream in streams:
            *_, error, done = stream.task.result()
            assert "shutting down" in error and done == "data: [DONE]"
        assert await router.exit_status() == 0


async def test_the_limits_of_keys_hold_over_all_processes(redis_server: EmbeddedRedis) -> None:
    prefill, decode = FakePrefill("p0", settings=PATIENT), FakeDecode("d0", settings=PATIENT)
    gate = decode.hold("token 3")
    async with (
        registered(redis_server.url, "limited", prefill, decode),
        running(redis_server.url, "limited", *FLAGS, "--key-concurrency", "4") as router,
    ):
        await answering(router)
        body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 6}

        async def complete() -> int:
            async with httpx.AsyncClient(base_url=router.client.base_url, timeout=2 * PATIENCE_S) as client:
                return (await client.post("/v1/completions", json=body)).status_code

        tasks = [asyncio.create_task(complete()) for _ in range(16)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(task.done() for task in tasks) < 12:
                await asyncio.sleep(0.01)
        gate.open.set()
        assert Counter(await asyncio.gather(*tasks)) == {200: 4, 429: 12}


@pytest.mark.parametrize(
    ("flags", "named"),
    [(("--message-port", "65535"), b"message_port"), (("--model", "/nowhere/at/all"), b"/nowhere/at/all")],
)
async def test_a_start_that_fails_ends_all_and_says_why(flags: tuple[str, str], named: bytes) -> None:
    async with running("redis://127.0.0.1:1/0", "none", *FLAGS, *flags, stderr=asyncio.subprocess.PIPE) as router:
        _, errors = await asyncio.wait_for(router.process.communicate(), PATIENCE_S)
        assert router.process.returncode in (1, 2)
        assert named in errors


async def test_a_port_that_another_router_has_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = ("--port", str(port))
        async with running("redis://127.0.0.1:1/0", "none", *FLAGS, *flags, stderr=asyncio.subprocess.PIPE) as router:
            _, errors = await asyncio.wait_for(router.process.communicate(), PATIENCE_S)
            assert router.process.returncode == 1
            assert b"in use" in errors
