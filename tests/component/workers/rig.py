"""Prefill and decode workers with the hash model, and a stub of a router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.fakes.hash_runner import VOCAB_SIZE, HashRunner
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import LocalWorker, StubRouter


@dataclass
class Fleet:
    """Workers and a router stub."""

    router: StubRouter
    prefill: list[LocalWorker]
    decode: list[LocalWorker]

    async def until_clean(self) -> None:
        """Everything was let go of on all living workers."""
        await until(lambda: all(worker.is_clean() for worker in [*self.prefill, *self.decode]))
        for worker in [*self.prefill, *self.decode]:
            worker.context.pool.check_integrity()
            assert worker.runner.num_sequences == 0


@asynccontextmanager
async def fleet(
    redis_url: str, prefill: list[HashRunner], decode: list[HashRunner], **settings: object
) -> AsyncIterator[Fleet]:
    workers = [LocalWorker(redis_url, "prefill", runner, **settings) for runner in prefill]
    workers += [LocalWorker(redis_url, "decode", runner, **settings) for runner in decode]
    for worker in workers:
        await worker.start()
    built = Fleet(StubRouter(), workers[: len(prefill)], workers[len(prefill) :])
    try:
        yield built
    finally:
        for worker in [*built.prefill, *built.decode]:
            await worker.stop()
        built.router.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE_S))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1, VOCAB_SIZE), k=length)
