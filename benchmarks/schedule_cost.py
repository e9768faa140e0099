"""What a step's bookkeeping costs: `schedule` and `commit` with many sequences running, beside a full queue.

Every sequence decodes (the common step); block size 16 and prompts of all lengths, so that one in 16 gets a new block.
Behind them `--waiting` prompts wait that cannot be admitted, five of which share a prefix of 512 tokens each.
With admissions: outputs of about 40 tokens, so that some six sequences end in a step and as many prompts of 256 tokens
are admitted, computed whole (budget 2048) and published; the pool holds twice what runs, so that each admission evicts.
Their arrival (`add`, which hashes the prompt) happens between steps, while a forward runs: a column of its own.
Milliseconds a step, of CPU time (other processes do not count), the garbage collector on: median and 99th percentile.
The aim is 1 ms at 256 sequences.

Usage: python -m benchmarks.schedule_cost [--running 256] [--waiting 512] [--steps 400] [--write FILE] [--profile NAME]
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.sequences import greedy_sequence
from kvrelay.engine.batch import RowResult, StepResult
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.policies.scheduler_registry import BUILT_IN, DEFAULT_SCHEDULER, make_scheduler
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
SHARED_TOKENS = 512
MAX_MODEL_LEN = 8192
WARM_STEPS = 200
HEADER = [
    "| scheduler | queue order | schedule, median | commit, median | both, median | both, p99 |",
    "|---|---|---:|---:|---:|---:|",
]
HEADER_ADMITTING = [f"{HEADER[0]} arrivals, median |", f"{HEADER[1]}---:|"]


def forward(plan: StepPlan) -> StepResult:
    """Draws the same token for everybody."""
    return StepResult(plan.step, [RowResult((5,) if row.sample else ()) for row in plan.rows], 0.01)


def decoding(name: str, order: QueueOrderName, num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler in the middle of its decodes, its queue full."""
    rng = np.random.default_rng(1)
    max_tokens = 2 * num_steps  # the first ones decode while the last ones' prompts are computed
    blocks_each = (PROMPT_TOKENS + max_tokens) // BLOCK_SIZE + 2
    pool = BlockPool(num_running * blocks_each + 64, BLOCK_SIZE)
    limits = SchedulerLimits(max(2048, num_running), num_running, MAX_MODEL_LEN, frozenset())
    settings = SchedulerSettings(queue_order=order, queue_starvation_bound=1 << 20)
    scheduler = make_scheduler(name, limits, pool, PrefixCache(pool), settings)
    for number in range(num_running):
        length = PROMPT_TOKENS + number % BLOCK_SIZE
        scheduler.add(greedy_sequence(number, rng.integers(0, 50_000, length), max_tokens, BLOCK_SIZE))
    while any(not s.is_decoding for s in scheduler.running.values()) or len(scheduler.waiting):
        scheduler.commit(plan := scheduler.schedule(), forward(plan))
    prefixes = rng.integers(0, 50_000, (max(1, num_waiting // 5), SHARED_TOKENS))
    for number in range(num_waiting):
        tokens = np.concatenate([prefixes[number % len(prefixes)], rng.integers(0, 50_000, 64)])
        scheduler.add(greedy_sequence(num_running + number, tokens, 64, BLOCK_SIZE))
    return scheduler


def timed_steps(scheduler: Scheduler, num_steps: int) -> Iterator[tuple[float, ...]]:
    """Seconds of `schedule` and of `commit`."""
    for _ in range(num_steps):
        start = time.process_time()
        plan = scheduler.schedule()
        planned = time.process_time()
        result = forward(plan)
        before = time.process_time()
        scheduler.commit(plan, result)
        yield planned - start, time.process_time() - before


def admitting(name: str, num_running: int, num_steps: int) -> Iterator[tuple[float, ...]]:
    """The same where sequences come and go, and seconds of `add`; the first steps, until the pool is full, do not
    count."""
    rng = np.random.default_rng(2)
    blocks_each = (PROMPT_TOKENS + 64) // BLOCK_SIZE + 1
    pool = BlockPool(2 * num_running * blocks_each, BLOCK_SIZE)
    limits = SchedulerLimits(2048, num_running, MAX_MODEL_LEN, frozenset())
    scheduler = make_scheduler(name, limits, pool, PrefixCache(pool), SchedulerSettings(queue_starvation_bound=1 << 20))
    number = 0
    for step in range(WARM_STEPS + num_steps):
        arrivals: list[Sequence] = []
        while len(scheduler.waiting) + len(arrivals) < 16:
            number += 1
            prompt, max_tokens = rng.integers(0, 50_000, PROMPT_TOKENS), int(rng.integers(20, 60))
            arrivals.append(greedy_sequence(number, prompt, max_tokens, BLOCK_SIZE))
        start = time.process_time()
        for arrival in arrivals:
            scheduler.add(arrival)
        added = time.process_time() - start
        (times,) = timed_steps(scheduler, 1)
        if step >= WARM_STEPS:
            yield *times, added


def row(name: str, order: str, steps: Iterator[tuple[float, ...]]) -> str:
    """Of the table. The third number of a step, where there is one, is what arrivals took."""
    times = 1e3 * np.array(list(steps))
    both = times[:, :2].sum(axis=1)
    schedule, commit, *added = np.median(times, axis=0)
    figures = (schedule, commit, np.median(both), np.percentile(both, 99), *added)
    return f"| {name} | {order} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def report(arguments: argparse.Namespace) -> str:
    cases = [(DEFAULT_SCHEDULER, order) for order in get_args(QueueOrderName)]
    cases += [(name, "fcfs") for name in BUILT_IN if name != DEFAULT_SCHEDULER]
    lines = [
        "# What a step's bookkeeping costs",
        "",
        f"Machine: {platform.machine()}, {os.cpu_count()} cores (one used), {platform.system()}, CPython "
        f"{platform.python_version()}. Repeat with `python -m benchmarks.schedule_cost`; the script's head says what "
        f"is measured. {arguments.running} sequences decode, {arguments.waiting} wait; milliseconds of CPU time a "
        f"step.",
        "",
        *HEADER,
    ]
    for name, order in cases:
        scheduler = decoding(name, order, arguments.running, arguments.waiting, arguments.steps)
        lines.append(row(name, order, timed_steps(scheduler, arguments.steps)))
    lines += ["", "With admissions:", "", *HEADER_ADMITTING]
    lines += [row(name, "fcfs", admitting(name, arguments.running, arguments.steps)) for name in BUILT_IN]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, or profiles one scheduler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--profile", choices=list(BUILT_IN), help="print where this scheduler's time goes instead")
    arguments = parser.parse_args()
    if arguments.profile:
        scheduler = decoding(arguments.profile, "lpm", arguments.running, arguments.waiting, arguments.steps)
        cProfile.runctx("list(timed_steps(scheduler, arguments.steps))", globals(), locals(), sort="tottime")
        return
    text = report(arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
