"""How the workers of one machine divide its cores: one prefill and one decode worker under `kvrelay up`, in turns.

- split: `--cores split`: each worker has half of the cores, whether the other one has work or not.
- dynamic: `--cores dynamic`, the default: a step also gets the cores of a worker that has nothing to do.
- shared: `--cores shared`: each worker has a thread per core, and the system schedules them.
- shared, nice N: the same with `--prefill-nice N`.

Closed loops of 1, 8 and 32 clients run on each: every client sends its next request when the last one has ended, so
with one client one of the workers is always idle, and with 32 hardly ever. The stacks start anew in every round, in
another order. The table has medians over rounds, the least and the most, and the median of the ratios to split in the
same round. Run it on an idle machine: it compares the waits for threads that another process keeps from running.

Usage, about ten minutes with two rounds:
    python -m benchmarks.core_sharing --model DIRECTORY --rounds 2 [--write benchmarks/results/core_sharing.md]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.client import Request, run_load
from tests.fakes.stack import Stack

SPLIT = "split"
MODES: dict[str, tuple[str, ...]] = {
    SPLIT: ("--cores", "split"),
    "dynamic": ("--cores", "dynamic"),
    "dynamic, nice 5": ("--cores", "dynamic", "--prefill-nice", "5"),
    "shared": ("--cores", "shared"),
    "shared, nice 5": ("--cores", "shared", "--prefill-nice", "5"),
    "shared, nice 15": ("--cores", "shared", "--prefill-nice", "15"),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One load of one run."""

    ttft_s: float
    gap_s: float
    worst_gap_s: float
    tokens_per_s: float


async def run_clients(stack: Stack, arguments: argparse.Namespace, num_clients: int, seed: int) -> Figures:
    """As many requests one after another as `--requests` says, from each client, but at most 192 in all."""
    rng = np.random.default_rng(seed)
    each = max(1, min(arguments.requests, 192 // num_clients))
    done: list[Request] = []

    async def client(prompts: list[np.ndarray]) -> None:
        for prompt in prompts:
            one = Request(0.0, prompt, arguments.output)
            await run_load(stack.base_url, stack.model, [one], lambda _: None)
            done.append(one)

    prompts = rng.integers(5, 2000, (num_clients, each, arguments.prompt)).astype(np.int32)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(client(list(own)) for own in prompts))
    seconds = loop.time() - began
    if failed := [request.failed for request in done if request.failed]:
        raise SystemExit(f"{len(failed)} requests failed, the first one with: {failed[0]}")
    gaps = [gap for request in done for gap in request.gaps_s]
    ttft = float(np.median([request.ttft_s for request in done]))
    worst = float(np.quantile(gaps, 0.99))
    return Figures(ttft, float(np.median(gaps)), worst, len(done) * arguments.output / seconds)


def run_stack(mode: str, arguments: argparse.Namespace, seed: int) -> dict[int, Figures]:
    """Starts a stack and runs all loads on it."""
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--prefill", "1", "--decode", "1", "--dtype", arguments.dtype, "--num-blocks", "6000"]
        flags += ["--transfer", "zmq", *MODES[mode], *arguments.flag]
        with Stack(arguments.model, Path(directory) / "state", *flags) as stack:
            asyncio.run(run_clients(stack, arguments, 2, seed + 1000))  # warm
            return {count: asyncio.run(run_clients(stack, arguments, count, seed)) for count in arguments.concurrency}


def cells(values: Sequence[float], base: Sequence[float], scale: float) -> str:
    """The median, the range, and the median of the ratios."""
    scaled = [scale * value for value in values]
    ratio = float(np.median([value / other for value, other in zip(values, base, strict=True)]))
    return f"{np.median(scaled):,.1f} ({min(scaled):,.1f} to {max(scaled):,.1f}), x{ratio:.2f}"


def report(rounds: list[dict[str, dict[int, Figures]]], arguments: argparse.Namespace) -> str:
    lines = [
        "# How services divide the cores of a machine",
        "",
        f"{platform.machine()} with {len(os.sched_getaffinity(0))} cores (load {os.getloadavg()[0]:.1f} at the end), "
        f"{arguments.model.name} in {arguments.dtype}, prompts of {arguments.prompt} tokens, {arguments.output} tokens "
        f"of output, {len(rounds)} rounds in turns. The script's head (`benchmarks/core_sharing.py`) says what is "
        "compared.",
        "",
        "| clients | cores | TTFT, ms | gap p50, ms | gap p99, ms | output tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for count in arguments.concurrency:
        for mode in rounds[0]:
            row = []
            for field, scale in (("ttft_s", 1e3), ("gap_s", 1e3), ("worst_gap_s", 1e3), ("tokens_per_s", 1.0)):
                found = [getattr(each[mode][count], field) for each in rounds]
                row.append(cells(found, [getattr(each[SPLIT][count], field) for each in rounds], scale))
            lines.append(f"| {count} | {mode} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--requests", type=int, default=12, help="of each client, at most 192 of all")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--flag", action="append", default=[], help="one more argument of `kvrelay up`; repeatable")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    modes = list(dict.fromkeys((SPLIT, *arguments.modes)))
    rounds: list[dict[str, dict[int, Figures]]] = []
    for number in range(arguments.rounds):
        start = number % len(modes)
        found = {}
        for mode in modes[start:] + modes[:start]:
            print(f"round {number + 1} of {arguments.rounds}: {mode}", file=sys.stderr, flush=True)
            found[mode] = run_stack(mode, arguments, seed=number)
        rounds.append({mode: found[mode] for mode in modes})
    text = report(rounds, arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
