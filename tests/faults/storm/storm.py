"""One storm: a system, a load, faults, and what must hold at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.storm.load import Load, Mismatch, make_jobs
from tests.faults.storm.processes import FaultStack, StackSettings
from tests.faults.storm.schedule import WEIGHTS, FaultKind, Trouble, draw_faults

SAMPLE_EVERY_S = 0.5
ROUTER_TOTALS = ("retries", "finished", "failed", "timed_out", "cancelled", "protocol_errors")
WORKER_TOTALS = ("handed_over", "handoffs_committed", "local_prompts", "resends", "quarantines", "preemptions")


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`concurrency` clients, each waiting `think_s` on average before its next request; up to `at_a_time` faults at
    once, `pause_s` on average between two beginnings."""

    num_requests: int
    seed: int
    num_kinds: int = 150
    concurrency: int = 24
    think_s: float = 1.0
    at_a_time: int = 2
    pause_s: float = 1.0
    kinds: Sequence[FaultKind] = tuple(WEIGHTS)


@dataclass(slots=True)
class Report:
    """What a storm did."""

    requests: Counter[str]
    faults: Counter[str]
    totals: Counter[str]
    errors: list[str]
    slowest_s: float
    took_s: float
    settings: dict[str, Any] = field(default_factory=dict)


async def run_storm(
    state_dir: Path,
    settings: StackSettings,
    options: StormOptions,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Raises AssertionError for a changed output, a late end, a crash, or something left behind."""
    stack = FaultStack(state_dir, settings)
    try:
        await stack.start()
        jobs = make_jobs(options.num_requests, options.seed, min(options.num_kinds, options.num_requests))
        urls = [stack.url(router) for router in stack.names("router")]
        load = Load(urls, settings.request_timeout_s, stack.stood_still_s)
        began = time.monotonic()
        references = await load.references(jobs, options.concurrency)
        load.counts.clear()
        tell(f"{len(references)} undisturbed runs took {time.monotonic() - began:.0f} s")
        faults = draw_faults(
            options.seed,
            stack.names("prefill", "decode"),
            stack.names("router"),
            kinds=options.kinds,
            pause_s=options.pause_s,
        )
        trouble = Trouble(stack, faults, options.at_a_time)
        totals = _Totals(stack)
        began = time.monotonic()
        over = asyncio.Event()
        num_ended = 0
        waiting = iter(jobs)
        thinking = random.Random(options.seed)

        async def client() -> None:
            nonlocal num_ended
            for job in waiting:
                await asyncio.sleep(thinking.expovariate(1 / options.think_s))
                await load.run(job, references[job.kind])
                num_ended += 1

        async def clients() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.concurrency):
                    group.create_task(client())
            over.set()

        async def watch() -> None:
            told_at = time.monotonic()
            while not over.is_set():
                await asyncio.sleep(SAMPLE_EVERY_S)
                stack.check_nobody_crashed()
                await totals.sample()
                if time.monotonic() - told_at > 10:
                    told_at = time.monotonic()
                    tell(f"{told_at - began:.0f} s: {num_ended} requests, {sum(trouble.counts.values())} faults")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(clients())
                group.create_task(trouble.run(over))
                group.create_task(watch())
        except* Exception as failures:
            raise _first_failure(failures, stack, options) from failures
        took_s = time.monotonic() - began
        assert num_ended == len(jobs), f"{num_ended} of {len(jobs)} requests ended"
        await stack.until_recounted()
        await totals.sample()
        return Report(load.counts, trouble.counts, totals.sum(), load.errors, load.slowest_s, took_s)
    finally:
        await stack.close()


def _first_failure(
    failures: ExceptionGroup[Exception], stack: FaultStack, options: StormOptions
) -> AssertionError | Mismatch:
    leaf: BaseException = failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    kind = Mismatch if isinstance(leaf, Mismatch) else AssertionError
    return kind(f"seed {options.seed}: {leaf!r}\nafter:\n" + "\n".join(stack.events[-30:]))


class _Totals:
    """Adds up what routers and workers counted, over their restarts."""

    def __init__(self, stack: FaultStack) -> None:
        self._stack = stack
        self._last: dict[tuple[str, str], dict[str, float]] = {}

    async def sample(self) -> None:
        async with asyncio.TaskGroup() as group:
            for router in self._stack.names("router"):
                group.create_task(self._sample(router))

    async def _sample(self, router: str) -> None:
        try:
            fleet = await self._stack.fleet(router)
        except httpx.HTTPError:
            return
        me = fleet["router"]
        self._last[me["router_id"], me["incarnation"]] = {name: fleet["requests"][name] for name in ROUTER_TOTALS}
        for worker in fleet["workers"]:
            known = {name: worker["totals"][name] for name in WORKER_TOTALS if name in worker["totals"]}
            self._last[worker["worker_id"], worker["incarnation"]] = known

    def sum(self) -> Counter[str]:
        result: Counter[str] = Counter()
        for totals in self._last.values():
            result.update(totals)
        return result
