"""What forced tokens of constrained rows cost the unconstrained rows of a batch, by how many of them a step may have.

Half of `BATCH` sequences are unconstrained. The others are constrained under `SCHEMAS` of `json_decoding`, and a new
one follows each that ends. Batches that differ in `RUNS_PART` of `step_planner`, one with masks alone and one without
constrained rows take turns of `TURN` steps in one process. A row's gap is the time of a step, which also computes the
prompts of new sequences.

Such a batch does more work the faster its programs end. So others get constrained sequences at the rate at which those
of masks alone end, beside as many unconstrained ones: what forced tokens cost these if the load is the same.

Usage: python -m benchmarks.forced_tokens --model DIR [--seconds 100] [--write benchmarks/results/forced_tokens.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.json_decoding import BATCH, BLOCK_SIZE, PROMPT_TOKENS, SCHEMAS, grammar_of
from benchmarks.sequences import sampled_sequence
from kvrelay.engine.causal_model import CausalModel, load_model, open_source
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduling import step_planner
from kvrelay.scheduling.policies.scheduler_registry import DEFAULT_SCHEDULER, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.worker.step_loop import worker_batch

NUM_BLOCKS = 1700
MAX_TOKENS = 400
TOKEN_BUDGET = 512
TURN = 8
NUM_WARM = 12
PARTS = (1, 8, 16, 32, 64)
PARTS_AT_RATE = (8, 32, 64)
FIRST_AT_RATE = 5  # constrained sequences at the start, about as many as there are then at a time


class Batch:
    """A loop of sequences on a runner of its own. It is closed, or constrained ones arrive as those of another end."""

    def __init__(
        self,
        model: CausalModel,
        num_constrained: int,
        runs_part: int,
        *,
        jumps: bool,
        num_others: int | None = None,
        rate_of: Batch | None = None,
    ) -> None:
        self.runner = TransformersRunner(model, NUM_BLOCKS)
        spec, pool = self.runner.spec, BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerLimits(TOKEN_BUDGET, BATCH, spec.max_model_len, frozenset(spec.eos_token_ids))
        settings = SchedulerSettings(jump_forward=jumps)
        self.scheduler = make_scheduler(DEFAULT_SCHEDULER, limits, pool, PrefixCache(pool), settings)
        self.times_s: list[float] = []
        self.forward_s: list[float] = []
        self.num_tokens = self.num_programs = self.num_others = self._number = 0
        self._rate_of, self._num_arrived = rate_of, 0
        self._runs_part = runs_part
        self._rng = np.random.default_rng(1)
        for number in range(num_constrained + (BATCH - num_constrained if num_others is None else num_others)):
            self._add(is_constrained=number < num_constrained)
        for _ in range(NUM_WARM):
            self.step()
        self.times_s.clear()
        self.forward_s.clear()
        self.num_tokens = self.num_programs = self.num_others = self._num_arrived = 0

    def _add(self, *, is_constrained: bool) -> None:
        schema = list(SCHEMAS.values())[self._number % len(SCHEMAS)]
        prompt_ids = self._rng.integers(5, 2000, PROMPT_TOKENS)
        grammar = grammar_of(schema) if is_constrained else None
        sequence = sampled_sequence(self._number, prompt_ids, MAX_TOKENS, BLOCK_SIZE, self._number, grammar)
        self._number += 1
        prompt: list[int] = sequence.tokens.view(0, PROMPT_TOKENS).tolist()
        self.runner.add_sequence(sequence.key, sequence.sampling, prompt, PROMPT_TOKENS)
        self.scheduler.add(sequence)

    def step(self) -> None:
        step_planner.RUNS_PART = self._runs_part
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        result = self.runner.execute(worker_batch(plan))
        outputs = self.scheduler.commit(plan, result)
        self.times_s.append(time.perf_counter() - started)
        self.forward_s.append(result.forward_s)
        self.num_tokens += sum(row.num_tokens for row in plan.rows)
        for output in outputs:
            sequence = output.sequence
            is_constrained = sequence.sampling.grammar is not None
            self.num_others += 0 if is_constrained else len(output.token_ids)
            if output.finish is not None:
                self.num_programs += is_constrained
                self.runner.drop_sequence(sequence.key)
                if not is_constrained or self._rate_of is None:
                    self._add(is_constrained=is_constrained)
        if self._rate_of is not None:
            self._let_arrive(self._rate_of)

    def _let_arrive(self, other: Batch) -> None:
        """As many constrained sequences as had ended in the other batch after as long a time."""
        rate = other.num_programs / max(sum(other.times_s), 1e-3)
        while self._num_arrived < rate * sum(self.times_s):
            self._num_arrived += 1
            self._add(is_constrained=True)


def line(name: str, batch: Batch, plain: Batch) -> str:
    times, plain_times = np.array(batch.times_s) * 1e3, np.array(plain.times_s) * 1e3
    seconds = sum(batch.times_s)
    return (
        f"| {name} | {batch.num_tokens / len(times):.0f} | {np.median(times):.1f} | "
        f"{np.median(batch.forward_s) * 1e3:.1f} | {np.mean(times) / np.mean(plain_times):.2f} | "
        f"{np.quantile(times, 0.99):.1f} | {batch.num_others / seconds:.0f} | {batch.num_programs / seconds:.1f} |"
    )


def compare(model: CausalModel, seconds: float) -> list[str]:
    batches = {
        "none constrained": Batch(model, 0, 1, jumps=True),
        "masks alone": Batch(model, BATCH // 2, 1, jumps=False),
    }
    for part in PARTS:
        chosen = " (chosen)" if part == CHOSEN else ""
        batches[f"up to {TOKEN_BUDGET // part}{chosen}"] = Batch(model, BATCH // 2, part, jumps=True)
    masks = batches["masks alone"]
    for part in PARTS_AT_RATE:
        batches[f"up to {TOKEN_BUDGET // part}, programs at the rate of masks alone"] = Batch(
            model, FIRST_AT_RATE, part, jumps=True, num_others=BATCH // 2, rate_of=masks
        )
    end, names = time.monotonic() + seconds, list(batches)
    while time.monotonic() < end:
        for name in names:
            for _ in range(TURN):
                batches[name].step()
        names.reverse()
    plain = batches["none constrained"]
    return [line(name, batch, plain) for name, batch in batches.items()]


CHOSEN = step_planner.RUNS_PART


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--write", type=Path)
    given: Any = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows = compare(load_model(open_source(given.model, given.dtype), BLOCK_SIZE), given.seconds)
    written = "\n".join(
        [
            "# Forced tokens beside unconstrained rows",
            "",
            f"{platform.machine()} with {os.cpu_count()} cores (load {load:.1f} when it began), one thread for the "
            f"model ({Path(given.model).name}) in {given.dtype}, {BATCH} sequences, half of them constrained, a token "
            f"budget of {TOKEN_BUDGET}, CPython {platform.python_version()}. Repeat with "
            "`python -m benchmarks.forced_tokens`; the script's head says what is measured.",
            "",
            "| forced tokens in a step | tokens in a step | step, ms | in the engine | mean, over none constrained | "
            "p99, ms | unconstrained tokens/s | programs/s |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    print(written)
    if given.write:
        given.write.write_text(written)


if __name__ == "__main__":
    main()
