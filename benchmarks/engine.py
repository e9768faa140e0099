"""Every scheduler on the real engine, in one process and one run: what a policy does to the tokens people wait for.

Two loads, each run with every scheduler in turn, `--repeats` times over; the clock is the wall's.

- Mixed: Poisson arrivals; prompts log-normal (median 150 tokens, one in 15 about 2,000), outputs too (median 40).
- Long prompt: 16 sequences decode; then a prompt of `--long` tokens arrives.

TTFT: from arrival to the first token. Gap: between two tokens of one sequence. Ratios within the run are what to trust.

Usage: python -m benchmarks.engine [--model DIR] [--threads 1] [--repeats 3] [--write benchmarks/results/engine.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.sequences import greedy_sequence
from kvrelay.engine.make import make_runner
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.policies.scheduler_registry import BUILT_IN, make_scheduler
from kvrelay.scheduling.scheduler_settings import Chunking, SchedulerLimits, SchedulerSettings
from kvrelay.worker.step_loop import worker_batch

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
BLOCK_SIZE = 16
TOKEN_BUDGET = 256
CASES: list[tuple[str, Chunking]] = [("sarathi", "fixed"), ("sarathi", "dynamic")]
CASES += [(name, "fixed") for name in BUILT_IN if name != "sarathi"]


@dataclass(slots=True)
class Job:
    """A prompt, when it arrives, and when its tokens came; seconds since the start."""

    arrival: float
    prompt: np.ndarray
    max_tokens: int
    token_times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return np.diff(self.token_times).tolist()


@dataclass(slots=True)
class Outcome:
    """A run's jobs, and how it went."""

    jobs: list[Job]
    wall_s: float
    bookkeeping_s: float


def mixed_load(num_jobs: int, rate: float) -> list[Job]:
    """Seeded, so that every scheduler gets the same."""
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_jobs))
    lengths = np.where(rng.random(num_jobs) < 1 / 15, 2000, np.minimum(rng.lognormal(np.log(150), 0.8, num_jobs), 1500))
    outputs = np.clip(rng.lognormal(np.log(40), 0.6, num_jobs), 2, 200)
    return [
        Job(float(at), rng.integers(5, 2000, max(1, int(length))).astype(np.int32), int(output))
        for at, length, output in zip(arrivals, lengths, outputs, strict=True)
    ]


def long_prompt_load(long_tokens: int) -> list[Job]:
    """Sixteen that decode, and a prompt that arrives among them."""
    rng = np.random.default_rng(8)
    jobs = [Job(0.0, rng.integers(5, 2000, 32).astype(np.int32), 300) for _ in range(16)]
    return [*jobs, Job(0.5, rng.integers(5, 2000, long_tokens).astype(np.int32), 4)]


def run(runner: TransformersRunner, name: str, chunking: Chunking, jobs: list[Job]) -> Outcome:
    """Serves the jobs as they arrive."""
    spec = runner.spec
    pool = BlockPool(spec.num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(TOKEN_BUDGET, 64, spec.max_model_len, frozenset())
    scheduler = make_scheduler(name, limits, pool, PrefixCache(pool), SchedulerSettings(chunking=chunking))
    waiting = list(jobs)
    serving: dict[SequenceKey, Job] = {}
    bookkeeping_s = 0.0
    started = time.perf_counter()
    while waiting or scheduler.has_work:
        now = time.perf_counter() - started
        while waiting and waiting[0].arrival <= now:
            job = waiting.pop(0)
            sequence = greedy_sequence(len(serving), job.prompt, job.max_tokens, BLOCK_SIZE)
            serving[sequence.key] = job
            runner.add_sequence(sequence.key, sequence.sampling, job.prompt.tolist(), len(job.prompt))
            scheduler.add(sequence)
        before = time.perf_counter()
        plan = scheduler.schedule()
        batch = worker_batch(plan)
        bookkeeping_s += time.perf_counter() - before
        if not plan.rows:
            time.sleep(max(0.0, waiting[0].arrival - (time.perf_counter() - started)))
            continue
        result = runner.execute(batch)
        before = time.perf_counter()
        outputs = scheduler.commit(plan, result)
        bookkeeping_s += time.perf_counter() - before
        now = time.perf_counter() - started
        for output in outputs:
            serving[output.sequence.key].token_times.append(now)
            if output.finish is not None:
                runner.drop_sequence(output.sequence.key)
    return Outcome(jobs, time.perf_counter() - started, bookkeeping_s)


def ms(values: list[float]) -> str:
    """Seconds as the median of milliseconds, with the least and the most."""
    return f"{1e3 * np.median(values):,.0f} ({1e3 * min(values):,.0f} to {1e3 * max(values):,.0f})"


def mixed_row(outcomes: list[Outcome]) -> list[str]:
    """Percentiles of each repeat, then the median over repeats."""
    ttft = [[job.token_times[0] - job.arrival for job in outcome.jobs] for outcome in outcomes]
    gaps = [[gap for job in outcome.jobs for gap in job.gaps] for outcome in outcomes]
    tokens = [sum(len(job.prompt) + job.max_tokens for job in o.jobs) / o.wall_s for o in outcomes]
    return [
        ms([float(np.median(values)) for values in ttft]),
        ms([float(np.quantile(values, 0.99)) for values in ttft]),
        ms([float(np.median(values)) for values in gaps]),
        ms([float(np.quantile(values, 0.99)) for values in gaps]),
        ms([max(values) for values in gaps]),
        f"{np.median(tokens):,.0f}",
        f"{np.median([o.bookkeeping_s / o.wall_s for o in outcomes]):.1%}",
    ]


def long_row(outcomes: list[Outcome]) -> list[str]:
    """Gaps of the sixteen that decoded, and what the long prompt waited."""
    gaps = [[gap for job in outcome.jobs[:-1] for gap in job.gaps] for outcome in outcomes]
    return [
        ms([float(np.median(values)) for values in gaps]),
        ms([float(np.quantile(values, 0.99)) for values in gaps]),
        ms([max(values) for values in gaps]),
        ms([outcome.jobs[-1].token_times[0] - outcome.jobs[-1].arrival for outcome in outcomes]),
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


Results = dict[tuple[str, Chunking], list[Outcome]]


def report(mixed: Results, long: Results, arguments: argparse.Namespace) -> str:
    lines = [
        "# Schedulers on the real engine",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores, {arguments.threads} thread(s) for the model, CPython "
        f"{platform.python_version()}. Token budget {TOKEN_BUDGET}, {arguments.repeats} repeats in turn: medians, with",
        "the least and the most over the repeats. Milliseconds. Repeat with `python -m benchmarks.engine`; the",
        "script's head says what is measured.",
        "",
        f"## Mixed, {arguments.jobs} requests, {arguments.rate:g} a second",
        "",
        *table(
            [
                "scheduler",
                "chunks",
                "TTFT p50",
                "TTFT p99",
                "gap p50",
                "gap p99",
                "worst gap",
                "tokens/s",
                "bookkeeping",
            ],
            [[*case, *mixed_row(outcomes)] for case, outcomes in mixed.items()],
        ),
        "",
        f"## A prompt of {arguments.long} tokens among 16 that decode",
        "",
        *table(
            ["scheduler", "chunks", "gap p50", "gap p99", "worst gap", "TTFT of the long prompt"],
            [[*case, *long_row(outcomes)] for case, outcomes in long.items()],
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs both loads and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    runner = make_runner(arguments.model, dtype="float32", num_threads=arguments.threads, num_blocks=6000)
    run(runner, "sarathi", "fixed", mixed_load(5, 100.0))  # warm
    mixed: Results = {case: [] for case in CASES}
    long: Results = {case: [] for case in CASES}
    for repeat in range(arguments.repeats):
        for case in CASES:
            print(f"repeat {repeat + 1} of {arguments.repeats}: {' '.join(case)}", flush=True)
            mixed[case].append(run(runner, *case, mixed_load(arguments.jobs, arguments.rate)))
            long[case].append(run(runner, *case, long_prompt_load(arguments.long)))
    text = report(mixed, long, arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
