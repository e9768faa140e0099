"""What masks cost the other rows of a batch, and their share of a step.

`BATCH` sequences decode in each of three batches: none constrained, half of them, and all of them, each constrained one
under a schema of its own. The batches take turns of `TURN` steps in one process, and the times are compared within each
round of turns, so a machine whose speed changes does not matter. A row is as slow as its step, so the time of a step
with constrained rows over that of one without is what they cost the others. The same for the CPU time of the thread
that runs the steps, which other load on the machine changes little. A step is planned, computed and committed
one after the other, as a worker on a CPU does.

Masks are computed in a thread beside the steps. Their share is the time of that thread over the time of steps.

The model is `small` of `benchmarks.peers.make_model` (a vocabulary of 32,000), with random weights, so constrained
strings are as long as their schemas allow. With jump-forward a constrained row brings several tokens, and its step
computes them, so steps are longer and fewer.

Usage: python -m benchmarks.mask_cost [--model DIR] [--rounds 30] [--write benchmarks/results/mask_cost.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.json_decoding import AMOUNT, BATCH, BLOCK_SIZE, PROMPT_TOKENS, grammar_of, record
from benchmarks.peers.make_model import VOCAB_SIZE, make_model, make_tokenizer
from benchmarks.sequences import greedy_sequence
from kvrelay.engine.causal_model import CausalModel, load_model, open_source
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.policies.scheduler_registry import DEFAULT_SCHEDULER, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.worker.step_loop import StepTotals, worker_batch

NUM_BLOCKS = 1700
NUM_FIELDS = 40
MAX_TOKENS = 800
TURN = 6  # steps, of which the first is not timed: masks were computed beside other batches
NUM_WARM = 2  # rounds that are not timed
CONSTRAINED = {"half": BATCH // 2, "all": BATCH}
FIELDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 16},
    AMOUNT,
    {"enum": ["EUR", "USD", "GBP"]},
    {"type": "boolean"},
    {"type": "string", "format": "date"},
)


def wide_schema(number: int) -> dict[str, Any]:
    """Longer than any answer here, and like no other."""
    return record(**{f"field_{number}_{each}": FIELDS[each % len(FIELDS)] for each in range(NUM_FIELDS)})


class MaskedBatch:
    """`BATCH` sequences on a runner of their own, of which the first ones are constrained."""

    def __init__(self, model: CausalModel, num_constrained: int, *, temperature: float, jumps: bool) -> None:
        self.runner = TransformersRunner(model, NUM_BLOCKS)
        spec, pool = self.runner.spec, BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerLimits(512, BATCH, spec.max_model_len, frozenset(spec.eos_token_ids))
        settings = SchedulerSettings(jump_forward=jumps)
        self.scheduler = make_scheduler(DEFAULT_SCHEDULER, limits, pool, PrefixCache(pool), settings)
        self.totals = StepTotals()
        rng = np.random.default_rng(1)
        for number in range(BATCH):
            grammar = grammar_of(wide_schema(number)) if number < num_constrained else None
            sequence = greedy_sequence(number, rng.integers(5, 2000, PROMPT_TOKENS), MAX_TOKENS, BLOCK_SIZE)
            sequence.sampling = Sampling(
                temperature=temperature, seed=number, max_tokens=MAX_TOKENS, ignore_eos=grammar is None, grammar=grammar
            )
            self.runner.add_sequence(
                sequence.key, sequence.sampling, sequence.tokens.view(0, PROMPT_TOKENS).tolist(), PROMPT_TOKENS
            )
            self.scheduler.add(sequence)

    def step(self) -> tuple[float, float]:
        """Returns the seconds that it took, and the seconds of CPU time of this thread."""
        started, cpu_started = time.perf_counter(), time.thread_time()
        plan = self.scheduler.schedule()
        result = self.runner.execute(worker_batch(plan))
        outputs = self.scheduler.commit(plan, result)
        took_s = time.perf_counter() - started, time.thread_time() - cpu_started
        self.totals.add(plan, result, ahead=False)
        if any(output.finish is not None for output in outputs):
            raise RuntimeError("an answer was complete before the last step; its schema is too short")
        return took_s

    def begin(self) -> None:
        """Steps until all grammars are compiled and all sequences decode."""
        for _ in range(1000):
            if all(sequence.num_output > 1 for sequence in self.scheduler.running.values()) and self.totals.num_steps:
                return
            self.step()
        raise RuntimeError("not all sequences decode")


def compare(model: CausalModel, rounds: int, *, temperature: float, jumps: bool) -> str:
    """A line of the table."""
    counts = (0, *CONSTRAINED.values())
    batches = {count: MaskedBatch(model, count, temperature=temperature, jumps=jumps) for count in counts}
    for batch in batches.values():
        batch.begin()
    warm_mask_s, times = 0.0, {count: np.zeros((rounds, 2)) for count in batches}
    for number in range(-NUM_WARM, rounds):
        if number == 0:
            warm_mask_s = batches[BATCH].totals.grammar_work.mask_s
        order = list(batches) if number % 2 else list(reversed(batches))
        for count in order:
            took_s = [batches[count].step() for _ in range(TURN)][1:]
            if number >= 0:
                times[count][number] = np.median(took_s, axis=0)
    mask_s = (batches[BATCH].totals.grammar_work.mask_s - warm_mask_s) / (rounds * TURN)
    cells = []
    for count in CONSTRAINED.values():
        low, middle, high = np.quantile(times[count] / times[0], [0.25, 0.5, 0.75], axis=0)
        cells.append(f"{middle[0]:.3f} ({low[0]:.3f} to {high[0]:.3f})")
    cells.append(f"{middle[1]:.3f} ({low[1]:.3f} to {high[1]:.3f})")
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    return (
        f"| {sampling} | {'jump-forward' if jumps else 'masks alone'} | {np.median(times[0][:, 0]) * 1e3:.1f} | "
        f"{' | '.join(cells)} | {mask_s / np.median(times[BATCH][:, 0]):.1%} |"
    )


@contextmanager
def made_model(given: str | None) -> Iterator[str]:
    """The directory of the model: the given one, or one that is made here."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as place:
        make_tokenizer(VOCAB_SIZE).save_pretrained(place)
        make_model("small", VOCAB_SIZE).save_pretrained(place)
        yield place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; else the small model is made")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with made_model(arguments.model) as model:
        torch.set_num_threads(1)
        loaded = load_model(open_source(model, arguments.dtype), BLOCK_SIZE)
        load = os.getloadavg()[0]
        lines = []
        for jumps in (False, True):
            for temperature in (0.0, 1.0):
                lines.append(compare(loaded, arguments.rounds, temperature=temperature, jumps=jumps))
                print(lines[-1], flush=True)
    written = "\n".join(
        [
            "# What masks cost a batch",
            "",
            f"{platform.machine()} with {os.cpu_count()} cores (load {load:.1f} when it began), one thread for the "
            f"model in {arguments.dtype}, {BATCH} sequences, CPython {platform.python_version()}. Steps with "
            f"constrained rows over steps without: medians of {arguments.rounds} rounds, and quartiles. Repeat with "
            "`python -m benchmarks.mask_cost`; the script's head says what is measured.",
            "",
            "| sampling | constrained rows | step without, ms | half constrained, over that | all constrained | CPU "
            "time, all constrained | masks' thread over steps, all constrained |",
            "|---|---|---:|---:|---:|---:|---:|",
            *lines,
            "",
            "With jump-forward constrained rows bring several tokens in a step, which computes them: it is longer, and "
            "the answers take fewer steps.",
            "",
        ]
    )
    print(written)
    if arguments.write:
        arguments.write.write_text(written)


if __name__ == "__main__":
    main()
