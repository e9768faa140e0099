"""A system and its load for tests that inject one fault at a chosen moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.storm.load import CHAT, COMPLETIONS, MODEL, Job, Load, Outcome, beam_search
from tests.faults.storm.processes import PATIENCE_S, FaultStack, StackSettings


@dataclass(slots=True)
class Bench:
    """Lives on the event loop of its tests' module: proxies only work while that runs something."""

    stack: FaultStack
    _references: dict[int, Outcome] = field(default_factory=dict)
    _round: int = 0

    def load(self, *routers: str) -> Load:
        settings = self.stack.settings
        urls = [self.stack.url(router) for router in routers or self.stack.names("router")]
        return Load(urls, settings.request_timeout_s, self.stack.stood_still_s)

    def make_jobs(self, number: int, *, max_tokens: int = 250) -> list[Job]:
        """Long prompts and long streams, most of them drafted, which their references are not; with another salt at
        each call, so that no cache spares the work."""
        self._round += 1
        return [_make_job(each, max_tokens, f"round {self._round}") for each in range(number)]

    async def jobs(
        self, number: int, num_beam_searches: int = 0, *, max_tokens: int = 250
    ) -> list[tuple[Job, Outcome]]:
        jobs = self.make_jobs(number, max_tokens=max_tokens)
        jobs += [_make_beam_search(number + each, f"round {self._round}") for each in range(num_beam_searches)]
        missing = [job for job in jobs if _kind(job) not in self._references]
        found = await self.load().references(missing, 8)
        self._references |= {_kind(job): found[job.kind] for job in missing}
        return [(job, self._references[_kind(job)]) for job in jobs]

    async def under_load(
        self, load: Load, jobs: list[tuple[Job, Outcome]], disturb: Callable[[], Awaitable[None]]
    ) -> None:
        """Every client asks again and again until `disturb` is done; all outputs must be equal, none an error."""
        disturbing = asyncio.ensure_future(disturb())

        async def client(job: Job, expected: Outcome) -> None:
            number = 0
            while True:
                salt = {"cache_salt": f"{job.body['cache_salt']} {number}"}
                salted = Job(job.number, job.kind, job.path, job.body | salt)
                await load.run(salted, expected)
                number += 1
                if disturbing.done():
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for job, expected in jobs:
                    group.create_task(client(job, expected))
            await disturbing
        finally:
            disturbing.cancel()
        assert not load.errors, load.errors

    async def until_none_running(self, router: str) -> None:
        """At one router alone, while another is away."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        held: dict[str, Any] = {}
        while asyncio.get_running_loop().time() < deadline:
            held = {}
            for name, worker in (await self.stack.workers(router)).items():
                blocks = {state: n for state, n in worker["blocks"].items() if state not in ("free", "cached", "total")}
                if any(blocks.values()) or not worker["live"]:
                    held[name] = blocks
            if not held:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still held: {held}")


@asynccontextmanager
async def open_bench(state_dir: Path, settings: StackSettings) -> AsyncIterator[Bench]:
    """A running system; at the end its workers recount their blocks, and it is ended."""
    stack = FaultStack(state_dir, settings)
    try:
        await stack.start()
        yield Bench(stack)
        await stack.until_recounted()
    finally:
        await stack.close()


def _kind(job: Job) -> int:
    return hash((job.kind, job.body["max_tokens"]))


def _make_beam_search(number: int, salt: str) -> Job:
    body = beam_search(number, random.Random(number))
    return Job(number, number, COMPLETIONS, body | {"cache_salt": salt})


def _make_job(number: int, max_tokens: int, salt: str) -> Job:
    rng = random.Random(f"bench {number}")
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": max_tokens,
        "temperature": number % 2,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": number % 4 != 3,
        "cache_salt": salt,
        "speculation": ("ngram", "suffix", "off")[number % 3],
    }
    if number % 5 == 4:
        return Job(number, number, CHAT, body | {"messages": [{"role": "user", "content": "a boat " * 60}]})
    prompt = rng.choices(range(4, 2048), k=rng.choice([8, 60, 140])) * 5  # for drafts
    return Job(number, number, COMPLETIONS, body | {"prompt": prompt})
