"""What constrained rows cost the unconstrained rows of the same batches, on a worker's step loop.

`BATCH` sequences, of which none, half, or all but one are constrained under `SCHEMAS` of `json_decoding`; a new one
follows each that ends. Unconstrained rows bring one token a step, so their tokens per second are the steps per second.
Where steps are launched ahead, as on a GPU, they are also measured with `samples_behind` off, where a constrained row
keeps the next step from being launched. The ways take turns in one process.

Usage: python -m benchmarks.mixed_batches --model DIR [--device cuda] [--load-format dummy] [--graphs] [--turns 3]
           [--seconds 4] [--write benchmarks/results/mixed_batches.md]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.json_decoding import BATCH, BLOCK_SIZE, PROMPT_TOKENS, SCHEMAS, grammar_of
from benchmarks.sequences import sampled_sequence
from kvrelay.engine.device import describe_device, find_device
from kvrelay.engine.graph_sizes import default_sizes
from kvrelay.engine.graphs import GraphSettings
from kvrelay.engine.make import make_runner
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies.scheduler_registry import DEFAULT_SCHEDULER, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.worker.launch import choose_launcher, overlaps_steps
from kvrelay.worker.step_loop import StepCallbacks, StepLoop

NUM_BLOCKS = 2600
FREE_TOKENS = 1000
MAX_TOKENS = 400
TOKEN_BUDGET = 512
WARM_PART = 0.25  # of a turn's time, at its start


@dataclass(frozen=True, slots=True)
class Way:
    num_constrained: int
    jumps: bool = False
    samples_behind: bool = False

    @property
    def name(self) -> str:
        if not self.num_constrained:
            return "none constrained"
        how = "jump-forward" if self.jumps else "masks alone"
        return f"{self.num_constrained} constrained, {how}"


@dataclass
class Turn:
    """One closed loop of sequences, for some seconds. Counts are of the time behind its first part."""

    runner: TransformersRunner
    way: Way
    seconds: float
    gaps_s: list[float] = field(default_factory=list)
    num_free_tokens: int = 0
    num_programs: int = 0
    took_s: float = 0.0
    share_ahead: float = 0.0

    def run(self, seed: int) -> Turn:
        spec, pool = self.runner.spec, BlockPool(self.runner.spec.num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(TOKEN_BUDGET, BATCH, spec.max_model_len, frozenset(spec.eos_token_ids))
        settings = SchedulerSettings(jump_forward=self.way.jumps, samples_behind=self.way.samples_behind)
        self._scheduler = make_scheduler(DEFAULT_SCHEDULER, limits, pool, PrefixCache(pool), settings)
        overlap = overlaps_steps(self.runner, "auto", is_simulated=False)
        launcher = choose_launcher(self.runner, overlap=overlap)
        self._loop = StepLoop(self.runner, self._scheduler, overlap=overlap, make_launcher=launcher)
        self._rng, self._number = np.random.default_rng(seed), 0
        self._started = self._measured_from = self._last = time.perf_counter()
        for number in range(BATCH):
            self._add(is_constrained=number < self.way.num_constrained)
        asyncio.run(self._loop.run(StepCallbacks(lambda plan: None, self._committed, self._failed)))
        totals = self._loop.totals
        self.took_s = self._last - self._measured_from
        self.share_ahead = totals.num_steps_launched_ahead / totals.num_steps
        return self

    def _add(self, *, is_constrained: bool) -> None:
        schema = list(SCHEMAS.values())[self._number % len(SCHEMAS)]
        prompt = self._rng.integers(5, 2000, PROMPT_TOKENS)
        max_tokens = MAX_TOKENS if is_constrained else FREE_TOKENS
        grammar = grammar_of(schema) if is_constrained else None
        self._loop.add(sampled_sequence(self._number, prompt, max_tokens, BLOCK_SIZE, self._number, grammar))
        self._number += 1

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        now = time.perf_counter()
        is_measured = now - self._started >= WARM_PART * self.seconds
        if not is_measured:
            self._measured_from = now
        else:
            self.gaps_s.append(now - self._last)
        self._last = now
        is_over = now - self._started >= self.seconds
        for output in outputs:
            sequence = output.sequence
            is_constrained = sequence.sampling.grammar is not None
            if is_measured:
                self.num_free_tokens += 0 if is_constrained else len(output.token_ids)
                self.num_programs += is_constrained and output.finish is not None
            if output.finish is not None and not is_over:
                self._add(is_constrained=is_constrained)
        if is_over:
            for key in list(self._scheduler.running):
                self._loop.abort(key)
            if not self._scheduler.has_work:
                self._loop.stop()

    def _failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise RuntimeError(cause)


def ways_of(runner: TransformersRunner) -> list[Way]:
    behind = [False, True] if runner.launches_ahead else [False]
    constrained = [
        Way(count, jumps, samples_behind)
        for count in (BATCH // 2, BATCH - 1)
        for jumps in (False, True)
        for samples_behind in behind
    ]
    return [Way(0), *constrained]


def compare(runner: TransformersRunner, turns: int, seconds: float) -> list[str]:
    """The rows of the table."""
    ways = ways_of(runner)
    for way in ways:
        Turn(runner, way, 1.0).run(0)  # compiles grammars and kernels
    found: dict[Way, list[Turn]] = {way: [] for way in ways}
    for turn in range(turns):
        for way in ways if turn % 2 else reversed(ways):
            found[way].append(Turn(runner, way, seconds).run(turn + 1))
    plain = [float(np.mean(each.gaps_s)) for each in found[ways[0]]]
    lines = []
    for way, each in found.items():
        ratios = [float(np.mean(turn.gaps_s)) / base for turn, base in zip(each, plain, strict=True)]
        gaps = np.concatenate([turn.gaps_s for turn in each]) * 1e3
        took_s = sum(turn.took_s for turn in each)
        num_free = max(1, BATCH - way.num_constrained)
        behind = "yes" if way.samples_behind else "no" if way.num_constrained and runner.launches_ahead else ""
        lines.append(
            f"| {way.name} | {behind} | {np.median(gaps):.2f} | {np.quantile(gaps, 0.99):.2f} | "
            f"{np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
            f"{sum(turn.num_free_tokens for turn in each) / took_s / num_free:.0f} | "
            f"{sum(turn.num_programs for turn in each) / took_s:.1f} | {np.mean([t.share_ahead for t in each]):.0%} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--graphs", action="store_true", help="capture decoding steps, on a GPU")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    device, load = find_device(given.device), os.getloadavg()[0]
    if device.type == "cpu":
        torch.set_num_threads(1)
    runner = make_runner(
        given.model,
        dtype=given.dtype,
        device=device,
        num_blocks=NUM_BLOCKS,
        max_model_len=2048,
        load_format=given.load_format,
        graphs=GraphSettings(default_sizes(256)) if given.graphs else None,
    )
    rows = compare(runner, given.turns, given.seconds)
    where = describe_device(device).split(" (")[0] if device.type == "cuda" else "one thread for the model"
    written = "\n".join(
        [
            "# Constrained and unconstrained rows in the same batches",
            "",
            f"{platform.machine()} with {os.cpu_count()} cores (load {load:.1f} when it began), {where}, the model of "
            f"{Path(given.model).name} in {given.dtype}, {BATCH} sequences, a token budget of {TOKEN_BUDGET}, CPython "
            f"{platform.python_version()}, torch {torch.__version__}. {given.turns} turns of {given.seconds:g} s. "
            "Repeat with `python -m benchmarks.mixed_batches`; the script's head says what is measured.",
            "",
            "| rows | sampled behind | gap between tokens, ms | p99 | mean, over none constrained | tokens/s of an "
            "unconstrained row | programs/s | launched ahead |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    print(written)
    if given.write:
        given.write.write_text(written)


if __name__ == "__main__":
    main()
