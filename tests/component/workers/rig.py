"""Prefill and decode workers with the hash model, and a stub of a router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.protocol.messages import AnyBody, Cancel, Stop
from kvrelay.protocol.sampling import Sampling
from tests.fakes.hash_runner import VOCAB_SIZE, HashRunner, expected_tokens
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import LocalWorker, Received, StubRouter


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


async def cancel_and_stop_at_any_moment(f: Fleet, num_requests: int, max_tokens: int) -> None:
    """All but every fifth of so many requests; those get their tokens, and nothing is left behind."""
    rng = random.Random(11)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    kept: list[tuple[list[int], Received]] = []
    for number in range(num_requests):
        name, prompt = f"r{number}", prompt_of(rng.randint(1, 120), number)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, name, prompt, sampling)
        if number % 5 == 0:
            kept.append((prompt, got))
            continue
        await asyncio.sleep(rng.random() * 0.02)
        bodies: list[AnyBody] = [Cancel(reason="the client is gone"), Stop()]
        body = rng.choice(bodies)
        for worker in rng.sample([f.prefill[0].me, f.decode[0].me], 2):
            f.router.send(worker, name, body)
    for prompt, got in kept:
        assert (await got.finished()).output == expected_tokens(prompt, sampling, 512)
    await f.until_clean()
