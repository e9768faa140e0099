"""What overlap gains: tokens a second with step N+1 planned, and N-1 published, while N is computed; and without.

A worker's step loop on the real engine, without the services around it: so many sequences of 32 prompt tokens decode to
their ends together. On and off take turns, and each pair gives a ratio: on a machine that others use too, ratios within
a run are what to trust. Counted from the step after which all decode. Bookkeeping: seconds of planning and booking for
each second of forwards, without overlap: what overlap can hide at most.

Usage: python -m benchmarks.overlap [--model DIR] [--threads 1] [--repeats 9] [--write benchmarks/results/overlap.md]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.sequences import greedy_sequence
from kvrelay.engine.make import make_runner
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.process import event_loop_factory
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies.scheduler_registry import DEFAULT_SCHEDULER, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.worker.step_loop import StepCallbacks, StepLoop, StepTotals

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
RUNNING = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Outcome:
    tokens_per_s: float
    totals: StepTotals


class Run:
    """Sequences on a step loop, from their arrival to their ends."""

    def __init__(self, runner: TransformersRunner, num_sequences: int, num_tokens: int, *, overlap: bool) -> None:
        spec = runner.spec
        pool = BlockPool(spec.num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(512, max(RUNNING), spec.max_model_len, frozenset())
        self.scheduler = make_scheduler(DEFAULT_SCHEDULER, limits, pool, PrefixCache(pool), SchedulerSettings())
        self.loop = StepLoop(runner, self.scheduler, overlap=overlap)
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.num_started = 0
        self.num_drawn = 0
        self.started = 0.0

    def committed(self, outputs: list[SequenceOutput]) -> None:
        """Counts; what a service does with its outputs beside is not part of this."""
        if self.num_started < self.num_sequences:
            self.num_started += sum(output.prefilled for output in outputs)
            self.started = time.perf_counter()
        else:
            self.num_drawn += sum(len(output.token_ids) for output in outputs)
        if not self.scheduler.has_work:
            self.loop.stop()

    def failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise RuntimeError(cause)

    async def serve(self) -> Outcome:
        rng = np.random.default_rng(1)
        for number in range(self.num_sequences):
            prompt = rng.integers(5, 2000, PROMPT_TOKENS)
            self.loop.add(greedy_sequence(number, prompt, self.num_tokens, BLOCK_SIZE))
        await self.loop.run(StepCallbacks(lambda plan: None, self.committed, self.failed))
        return Outcome(self.num_drawn / (time.perf_counter() - self.started), self.loop.totals)


def measure(runner: TransformersRunner, num_sequences: int, num_tokens: int, *, overlap: bool) -> Outcome:
    """One run on an event loop of its own."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as loop:
        return loop.run(Run(runner, num_sequences, num_tokens, overlap=overlap).serve())


def row(num_sequences: int, pairs: list[tuple[Outcome, Outcome]]) -> str:
    """Medians over the pairs (off, on), and the ratio's least and most."""
    ratios = [on.tokens_per_s / off.tokens_per_s for off, on in pairs]
    off, on = (np.median([pair[side].tokens_per_s for pair in pairs]) for side in (0, 1))
    books = [(o.totals.schedule_s + o.totals.commit_s) / o.totals.forward_s for o, _ in pairs]
    ahead = [o.totals.num_steps_ahead / o.totals.num_steps for _, o in pairs]
    low, high = np.quantile(ratios, [0.25, 0.75])
    return (
        f"| {num_sequences} | {off:,.0f} | {on:,.0f} | {np.median(ratios):.3f} | {low:.3f} to {high:.3f} "
        f"| {min(ratios):.3f} to {max(ratios):.3f} | {np.median(books):.1%} | {np.median(ahead):.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    runner = make_runner(arguments.model, dtype="float32", num_threads=arguments.threads, num_blocks=6000)
    measure(runner, 4, 20, overlap=True)  # warm
    load = os.getloadavg()[0]
    lines = [
        "# What overlap gains",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores (load {load:.0f} when it began), {arguments.threads} "
        f"thread(s) for the model, CPython {platform.python_version()}, {arguments.repeats} pairs. Repeat with "
        "`python -m benchmarks.overlap`; the script's head says what is measured.",
        "",
        "| running | tokens/s, off | on | ratio, median | its quartiles | its range | bookkeeping | planned ahead |",
        "|---:|---:|---:|---:|---|---|---:|---:|",
    ]
    for num_sequences in RUNNING:
        num_tokens = max(20, 600 // num_sequences)
        pairs = []
        for repeat in range(arguments.repeats):
            first, second = (measure(runner, num_sequences, num_tokens, overlap=bool(repeat % 2 ^ on)) for on in (0, 1))
            pairs.append((second, first) if repeat % 2 else (first, second))
        lines.append(row(num_sequences, pairs))
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
