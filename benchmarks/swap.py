"""Preemption by recomputation against swapping to host memory, on the real engine: where they cross, and what each does
to a load that the pool is too small for.

- Crossing: one sequence of L tokens of K/V. Recompute: the seconds of a prefill of L tokens in chunks of the token
  budget. Swap: the seconds of copying its blocks to the host's buffer and back, the pool's blocks scattered. Both in
  turn, `--repeats` times; the ratio recompute / swap of each repeat: median (least to most). Above 1 swapping is
  faster.
- Where the prefix cache keeps some of the blocks, recomputation costs less, and swapping less too (only what is gone
  comes back). The table names the share of lost blocks at which both take the same.
- Pressure: `--jobs` requests at once over a pool of `--pool` blocks; without and with a prefix cache. Tokens are the
  same in each case (checked). Throughput is per second of this process's CPU time, which other work on the machine
  moves less than the wall's, and relative to recompute in the same repeat. Gaps between tokens are the wall's.

Usage: python -m benchmarks.swap [--model DIR] [--threads 1] [--repeats 5] [--write benchmarks/results/swap.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.sequences import greedy_sequence
from kvrelay.engine.batch import SwapCopies, WorkerBatch, WorkerRow
from kvrelay.engine.make import make_runner
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.policies.scheduler_registry import make_scheduler
from kvrelay.scheduling.scheduler_settings import Preemption, SchedulerLimits, SchedulerSettings
from kvrelay.worker.step_loop import worker_batch

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
TOKEN_BUDGET = 512
BLOCK_SIZES = (8, 16, 32, 64, 128)
LENGTHS = (64, 256, 1024, 4096)
SWAP_BYTES = 1 << 28
WAYS: tuple[Preemption, ...] = ("recompute", "swap", "auto")


def prefill_s(runner: TransformersRunner, num_tokens: int, blocks: np.ndarray) -> float:
    """Seconds of a prompt's chunks, nothing beside them."""
    tokens = np.random.default_rng(num_tokens).integers(5, 2000, num_tokens).astype(np.int32)
    seconds = 0.0
    for start in range(0, num_tokens, TOKEN_BUDGET):
        part = tokens[start : start + TOKEN_BUDGET]
        row = WorkerRow(("recompute", 1, 0), part, start, blocks, sample=False, is_prefill=True)
        seconds += runner.execute(WorkerBatch(0, [row])).forward_s
    return seconds


def swap_s(runner: TransformersRunner, blocks: np.ndarray) -> tuple[float, float]:
    """Seconds out, seconds back."""
    copies = SwapCopies(tuple(blocks.tolist()), tuple(range(len(blocks))))
    out = runner.execute(WorkerBatch(0, [], swap_out=copies)).copy_s
    return out, runner.execute(WorkerBatch(0, [], swap_in=copies)).copy_s


def crossing(arguments: argparse.Namespace) -> list[str]:
    """A row a block size and length."""
    rows = []
    for block_size in BLOCK_SIZES:
        num_blocks = 2 * max(LENGTHS) // block_size
        runner = load(arguments, block_size, num_blocks)
        for length in LENGTHS:
            rng = np.random.default_rng(length)
            blocks = rng.permutation(num_blocks)[: blocks_for(length, block_size)].astype(np.int32)
            prefill_s(runner, min(length, 512), blocks), swap_s(runner, blocks)  # warm
            recomputed, out, back = [], [], []
            for _ in range(arguments.repeats):
                recomputed.append(prefill_s(runner, length, blocks))
                seconds = swap_s(runner, blocks)
                out.append(seconds[0])
                back.append(seconds[1])
            ratio = np.array(recomputed) / (np.array(out) + np.array(back))
            # Equal where share * recompute = out + share * back.
            share = np.median(np.array(out) / (np.array(recomputed) - np.array(back)))
            cells = [block_size, length, ms(recomputed), ms(out), ms(back), spread(ratio), f"{max(share, 0):.2%}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
            print(rows[-1], flush=True)
    return rows


@dataclass(slots=True)
class Outcome:
    """One run under pressure."""

    tokens: list[list[int]]
    cpu_s: float
    gaps: list[float]
    num_preemptions: int
    num_swapped: int
    num_computed: int
    num_copied: int


def pressure_jobs(num_jobs: int) -> list[tuple[np.ndarray, int]]:
    """Prompts of a hundred to a thousand tokens, outputs of as many as a hundred to four hundred."""
    rng = np.random.default_rng(5)
    return [
        (rng.integers(5, 2000, int(rng.integers(100, 1000))).astype(np.int32), int(rng.integers(100, 400)))
        for _ in range(num_jobs)
    ]


def run(runner: TransformersRunner, way: Preemption, jobs: list[tuple[np.ndarray, int]], *, cached: bool) -> Outcome:
    """All jobs at once, until the last ends."""
    spec = runner.spec
    pool = BlockPool(spec.num_blocks, spec.block_size)
    cache: Cache = PrefixCache(pool) if cached else NullCache()
    limits = SchedulerLimits(TOKEN_BUDGET, 64, spec.max_model_len, frozenset())
    settings = SchedulerSettings(preemption=way, num_swap_slots=spec.num_swap_slots, swap_block_s=spec.swap_block_s)
    scheduler = make_scheduler("sarathi", limits, pool, cache, settings)
    sequences = [greedy_sequence(number, *job, spec.block_size) for number, job in enumerate(jobs)]
    for sequence in sequences:
        runner.add_sequence(sequence.key, sequence.sampling, [], sequence.num_prompt)
        scheduler.add(sequence)
    times: dict[SequenceKey, list[float]] = {sequence.key: [] for sequence in sequences}
    num_computed = 0
    started, cpu_started = time.perf_counter(), time.process_time()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan.has_work:
            continue
        outputs = scheduler.commit(plan, runner.execute(worker_batch(plan)))
        num_computed += plan.num_prefill_tokens + plan.num_decode_tokens
        now = time.perf_counter() - started
        for output in outputs:
            times[output.sequence.key].append(now)
            if output.finish is not None:
                runner.drop_sequence(output.sequence.key)
    use = scheduler.swap_use
    return Outcome(
        [s.tokens.view(s.num_prompt, s.num_tokens).tolist() for s in sequences],
        time.process_time() - cpu_started,
        [float(gap) for each in times.values() for gap in np.diff(each)],
        scheduler.num_preemptions,
        use.num_preemptions,
        num_computed,
        use.num_blocks_out + use.num_blocks_in,
    )


def pressure(arguments: argparse.Namespace) -> list[str]:
    """A row a way, without and with a cache."""
    runner = load(arguments, 16, arguments.pool)
    jobs = pressure_jobs(arguments.jobs)
    num_tokens = sum(len(prompt) + max_tokens for prompt, max_tokens in jobs)
    rows = []
    for cached in (False, True):
        outcomes: dict[Preemption, list[Outcome]] = {way: [] for way in WAYS}
        for repeat in range(arguments.pressure_repeats):
            for way in WAYS:
                outcomes[way].append(run(runner, way, jobs, cached=cached))
                assert outcomes[way][-1].tokens == outcomes["recompute"][0].tokens, "other tokens"
                print(f"pressure, cache {cached}, repeat {repeat + 1}: {way}", flush=True)
        base = np.array([outcome.cpu_s for outcome in outcomes["recompute"]])
        for way, runs in outcomes.items():
            seconds = np.array([outcome.cpu_s for outcome in runs])
            one = runs[-1]
            cells = [
                "with" if cached else "without",
                way,
                f"{num_tokens / np.median(seconds):,.0f}",
                spread(base / seconds),
                f"{one.num_preemptions} ({one.num_swapped})",
                f"{one.num_computed:,}",
                f"{one.num_copied:,}",
                ms([float(np.quantile(outcome.gaps, 0.99)) for outcome in runs]),
                ms([max(outcome.gaps) for outcome in runs]),
            ]
            rows.append("| " + " | ".join(cells) + " |")
            print(rows[-1], flush=True)
    return rows


def load(arguments: argparse.Namespace, block_size: int, num_blocks: int) -> TransformersRunner:
    """The model with a pool, and a swap space that is as large or larger."""
    return make_runner(
        arguments.model,
        dtype="float32",
        num_threads=arguments.threads,
        block_size=block_size,
        num_blocks=num_blocks,
        swap_bytes=SWAP_BYTES,
    )


def ms(seconds: list[float]) -> str:
    """The median in milliseconds, with the least and the most."""
    low, middle, high = 1e3 * min(seconds), 1e3 * float(np.median(seconds)), 1e3 * max(seconds)
    digits = 2 if middle < 10 else 0
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def spread(ratios: np.ndarray) -> str:
    """The median, with the least and the most."""
    digits = 2 if np.median(ratios) < 10 else 0
    return f"{np.median(ratios):.{digits}f} ({ratios.min():.{digits}f} to {ratios.max():.{digits}f})"


CROSSING_COLUMNS = ["block size", "tokens", "recompute, ms", "out, ms", "back, ms", "recompute / swap", "equal at"]
PRESSURE_COLUMNS = ["cache", "preemption", "tokens/CPU s", "throughput / recompute", "preemptions (by swap)"]
PRESSURE_COLUMNS += ["tokens computed", "blocks copied", "gap p99, ms", "worst gap, ms"]


def main() -> None:
    """Runs both and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pressure-repeats", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--pool", type=int, default=100)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    crossed, pressed = crossing(arguments), pressure(arguments)
    report = [
        "# Preemption: recompute or swap",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores, {arguments.threads} thread(s) for the model, "
        f"{Path(arguments.model).name} in float32, CPython {platform.python_version()}.",
        "Medians, with the least and the most over the repeats. Repeat with `python -m benchmarks.swap`; the script's",
        "head says what is measured. Other work on the machine moves the milliseconds; ratios are taken in a repeat.",
        "",
        "## Where they cross",
        "",
        f"Token budget {TOKEN_BUDGET}, {arguments.repeats} repeats. Ratios above 1: swapping is faster.",
        "`equal at`: the share of the sequence's blocks that must be lost for swapping to be no slower (blocks that",
        "the prefix cache keeps are not computed again, and not copied back).",
        "",
        "| " + " | ".join(CROSSING_COLUMNS) + " |",
        "|" + "---:|" * len(CROSSING_COLUMNS),
        *crossed,
        "",
        "## Under pressure",
        "",
        f"{arguments.jobs} requests at once over {arguments.pool} blocks of 16 tokens, and a swap space that holds",
        f"all of them; {arguments.pressure_repeats} repeats.",
        "",
        "| " + " | ".join(PRESSURE_COLUMNS) + " |",
        "|---|---|" + "---:|" * (len(PRESSURE_COLUMNS) - 2),
        *pressed,
        "",
    ]
    print("\n".join(report))
    if arguments.write:
        arguments.write.write_text("\n".join(report), encoding="utf-8")


if __name__ == "__main__":
    main()
