"""One storm: a system, a load, faults, and what must hold at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.storm.load import SAMPLES_SHARE, Job, Load, Mismatch, draw_jobs, make_jobs
from tests.faults.storm.processes import FaultStack, Holding, StackSettings
from tests.faults.storm.schedule import WEIGHTS, FaultKind, Trouble, draw_faults

SAMPLE_EVERY_S = 0.5
TELL_EVERY_S = 10.0
ROUTER_TOTALS = ("retries", "finished", "failed", "timed_out", "cancelled", "protocol_errors")
WORKER_TOTALS = ("handed_over", "handoffs_committed", "local_prompts", "resends", "quarantines", "preemptions")


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`concurrency` clients, each waiting `think_s` on average before its next request; up to `at_a_time` faults at
    once, `pause_s` on average between two beginnings. There are `num_requests`, and as many more as it takes until
    `min_faults` have begun: how many begin meanwhile depends on the machine."""

    num_requests: int
    seed: int
    num_kinds: int = 150
    concurrency: int = 24
    think_s: float = 1.0
    at_a_time: int = 2
    pause_s: float = 1.0
    kinds: Sequence[FaultKind] = tuple(WEIGHTS)
    samples_share: float = SAMPLES_SHARE
    constrained_share: float = 0.0
    min_faults: int = 0


@dataclass(slots=True)
class Report:
    """What a storm did, with so many requests."""

    num_requests: int
    requests: Counter[str]
    faults: Counter[str]
    totals: Counter[str]
    errors: list[str]
    slowest_s: float
    took_s: float
    holdings: dict[str, tuple[Holding, Holding]] = field(default_factory=dict)
    """Of the processes that lived through it: what they held before and after."""
    constrained: Counter[str] = field(default_factory=Counter)
    """Of the storm's requests that got their answer: constrained ones, and their outputs: complete ones, all valid, and
    ones cut by `max_tokens`."""
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
        storm = _Storm(stack, options, tell)
        await storm.find_references()
        before = stack.holdings()
        took_s = await storm.rage()
        await stack.until_recounted()
        report, after = await storm.report(took_s), stack.holdings()
        report.holdings = {name: (before[name, pid], after[name, pid]) for name, pid in before.keys() & after.keys()}
        return report
    finally:
        await stack.close()


class _Storm:
    """Clients, faults and their watch, at one time."""

    def __init__(self, stack: FaultStack, options: StormOptions, tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._options = options
        self._tell = tell
        self._num_kinds = min(options.num_kinds, options.num_requests)
        urls = [stack.url(router) for router in stack.names("router")]
        self._load = Load(urls, stack.settings.request_timeout_s, stack.stood_still_s)
        faults = draw_faults(
            options.seed,
            stack.names("prefill", "decode"),
            stack.names("router"),
            kinds=options.kinds,
            pause_s=options.pause_s,
        )
        self._trouble = Trouble(stack, faults, options.at_a_time)
        self._totals = _Totals(stack)
        self._thinking = random.Random(options.seed)
        self._waiting = self._draw_jobs()
        self._num_begun = 0
        self._num_ended = 0
        self._over = asyncio.Event()

    async def find_references(self) -> None:
        """What every kind of job gives while nothing is disturbed."""
        began = time.monotonic()
        options = self._options
        jobs = make_jobs(
            self._num_kinds, options.seed, self._num_kinds, options.samples_share, options.constrained_share
        )
        self._references = await self._load.references(jobs, options.concurrency)
        self._load.counts.clear()
        self._load.constrained.clear()
        self._tell(f"{len(self._references)} undisturbed runs took {time.monotonic() - began:.0f} s")

    async def rage(self) -> float:
        """Returns the seconds it took. Raises AssertionError, with what was done last."""
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._clients())
                group.create_task(self._trouble.run(self._over))
                group.create_task(self._watch(began))
        except* Exception as failures:
            raise _first_failure(failures, self._stack, self._options) from failures
        assert self._num_ended == self._num_begun, f"{self._num_ended} of {self._num_begun} requests ended"
        return time.monotonic() - began

    async def report(self, took_s: float) -> Report:
        await self._totals.sample()
        load, faults = self._load, self._trouble.counts
        totals = self._totals.sum()
        report = Report(self._num_begun, load.counts, faults, totals, load.errors, load.slowest_s, took_s)
        report.constrained = load.constrained
        return report

    def _draw_jobs(self) -> Iterator[Job]:
        """To be shared by all clients."""
        options = self._options
        for job in draw_jobs(options.seed, self._num_kinds, options.samples_share, options.constrained_share):
            has_all = self._num_begun >= options.num_requests
            if has_all and self._trouble.counts.total() >= options.min_faults:
                return
            self._num_begun += 1
            yield job

    async def _clients(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.concurrency):
                group.create_task(self._client())
        self._over.set()

    async def _client(self) -> None:
        for job in self._waiting:
            await asyncio.sleep(self._thinking.expovariate(1 / self._options.think_s))
            await self._load.run(job, self._references[job.kind])
            self._num_ended += 1

    async def _watch(self, began: float) -> None:
        told_at = time.monotonic()
        while not self._over.is_set():
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._stack.check_nobody_crashed()
            await self._totals.sample()
            if time.monotonic() - told_at > TELL_EVERY_S:
                told_at = time.monotonic()
                num_faults = sum(self._trouble.counts.values())
                self._tell(f"{told_at - began:.0f} s: {self._num_ended} requests, {num_faults} faults")


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
