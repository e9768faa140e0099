"""A router whose log and event log are taken by nobody, as by a disk that stands still, serves and ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill
from tests.component.dispatch.test_server import RouterProcess, registered, running

NUM_REQUESTS = 20


@contextmanager
def stalled_pipe(path: Path) -> Iterator[int]:
    """A full pipe whose reader does not read, as one that was stopped. Returns the writer's end."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


async def ask(router: RouterProcess) -> None:
    body = {"model": DEMO_MODEL_NAME, "prompt": "otter", "max_tokens": 8}
    answer = (await router.client.post("/v1/completions", json=body)).raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == 8


async def test_a_router_whose_logs_are_not_taken_serves_and_ends(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    with stalled_pipe(tmp_path / "events"), stalled_pipe(tmp_path / "log") as stderr:
        flags = ("--event-log", str(tmp_path / "events"), "--log-level", "debug")
        async with (
            registered(redis_server.url, "stalled", FakePrefill("p0"), FakeDecode("d0")),
            running(redis_server.url, "stalled", *flags, stderr=stderr) as router,
        ):
            await router.ready({"prefill": 1, "decode": 1})
            for _ in range(NUM_REQUESTS):
                await ask(router)
            router.process.terminate()
            assert await router.exit_status() == 0
