"""A worker that lost a part of itself ends, so that it is started again."""

from __future__ import annotations

import asyncio

import pytest

from tests.component.workers.rig import run
from tests.fakes.hash_runner import HashRunner
from tests.fakes.workers import LocalWorker


def test_a_thread_that_dies_ends_the_worker(redis_url: str) -> None:
    async def test() -> None:
        worker = LocalWorker(redis_url, "decode", HashRunner())
        await worker.start()
        error = RuntimeError("the socket is gone")
        context = {"message": "the thread kv-receiver ended", "exception": error, "fatal": True}
        asyncio.get_running_loop().call_exception_handler(context)
        assert worker._task is not None
        with pytest.raises(RuntimeError, match="the socket is gone"):
            await worker._task
        await worker.shell.leave()
        worker.shell.close()

    run(test)
