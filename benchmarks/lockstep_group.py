"""The prefill delayer in a group of processes with data-parallel attention, on and off, over HTTP.

`kvrelay up --prefill 0 --decode-data-parallel-size SIZE`, one thread for each rank, on this machine, with the demo
model. If cores are fewer than ranks, the ranks share them: a step then lasts as long as all ranks' rows together, not
as the slowest rank's, so the delayer gains less than on devices of their own. benchmarks/data_parallel.py simulates
those.

Requests arrive by a Poisson process, singly or in bursts of four, at a router that places them. Prompts and outputs are
log-normal. The requests are the same in all variants, which take turns.

Usage: python -m benchmarks.lockstep_group [--size 4] [--rate 4] [--requests 120] [--repeats 2] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.client import Request, run_load
from benchmarks.simulated_runs import publish
from tests.fakes.stack import Stack

FLAGS = (
    *("--prefill=0", "--threads=1", "--dtype=float32"),
    *("--num-blocks=2048", "--token-budget=512", "--max-running=32"),
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "off": (),
    "on": ("--prefill-delayer",),
    "on, at most 10 passes": ("--prefill-delayer", "--prefill-delayer-max-passes=10"),
}
BURSTS = {"singly": 1, "in bursts of 4": 4}
OUTCOME = "prefill_delayer."


@dataclass(frozen=True, slots=True)
class Outcome:
    """One load on one variant. `passes`: decisions of the group, by the ranks with a prompt and the reason."""

    requests: list[Request]
    passes: Counter[str]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens, from the first arrival to the last token."""
        ends = max(request.token_times_s[-1] for request in self.requests)
        tokens = sum(len(request.token_times_s) for request in self.requests)
        return tokens / (ends - self.requests[0].arrival_s)

    @property
    def delayed(self) -> float:
        """Share of the passes with a prompt that held it back."""
        asked = sum(count for name, count in self.passes.items() if not name.endswith(".no_prompt"))
        held = sum(count for name, count in self.passes.items() if name.endswith(".delay"))
        return held / asked if asked else 0.0


def uneven_load(number: int, rate: float, burst: int, seed: int) -> list[Request]:
    """Requests of this mean rate per second."""
    rng = np.random.default_rng(seed)
    at_s, requests = 0.0, []
    for index in range(number):
        if index % burst == 0:
            at_s += float(rng.exponential(burst / rate))
        prompt = int(np.clip(rng.lognormal(np.log(300), 0.8), 16, 2000))
        output = int(np.clip(rng.lognormal(np.log(50), 0.6), 4, 200))
        requests.append(Request(at_s, rng.integers(5, 2000, prompt).astype(np.int32), output))
    return requests


def passes_of(stack: Stack) -> Counter[str]:
    """Decisions so far. All ranks count the same ones, so rank 0's are taken."""
    (totals,) = [worker["totals"] for worker in stack.workers() if worker["worker_id"] == "decode-0"]
    return Counter({name.removeprefix(OUTCOME): int(n) for name, n in totals.items() if name.startswith(OUTCOME)})


def run_variant(flags: Sequence[str], arguments: argparse.Namespace, seed: int) -> dict[str, Outcome]:
    """Starts a group and runs each load on it."""
    found = {}
    flags = (*FLAGS, f"--decode-data-parallel-size={arguments.size}", *flags)
    with (
        tempfile.TemporaryDirectory() as directory,
        Stack(arguments.model, Path(directory) / "state", *flags) as stack,
    ):
        warm_up = uneven_load(2 * arguments.size, 20.0, 1, seed=1)
        asyncio.run(run_load(stack.base_url, stack.model, warm_up, lambda _: None))
        for name, burst in BURSTS.items():
            before = passes_of(stack)
            requests = uneven_load(arguments.requests, arguments.rate, burst, seed + burst)
            asyncio.run(run_load(stack.base_url, stack.model, requests, lambda _: None))
            failed = [request.failed for request in requests if request.failed]
            if failed:
                raise SystemExit(f"{len(failed)} requests failed, the first one with: {failed[0]}")
            found[name] = Outcome(requests, passes_of(stack) - before)
    return found


HEAD = (
    "| Delayer | Output tokens/s | TTFT p50, s | p99 | TPOT p50, ms | p99 | Gap p99, ms | Latency p50, s | p99 | "
    "Passes delayed |\n|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, outcome: Outcome) -> str:
    requests = outcome.requests
    first = [each.ttft_s for each in requests]
    gaps = np.concatenate([each.gaps_s for each in requests])
    per_token = [np.mean(each.gaps_s) for each in requests]
    whole = [each.token_times_s[-1] - each.arrival_s for each in requests]
    cells = [
        f"{outcome.tokens_per_s:.0f}",
        *(f"{np.percentile(first, q):.2f}" for q in (50, 99)),
        *(f"{1e3 * np.percentile(per_token, q):.1f}" for q in (50, 99)),
        f"{1e3 * np.percentile(gaps, 99):.0f}",
        *(f"{np.percentile(whole, q):.1f}" for q in (50, 99)),
        f"{outcome.delayed:.2f}" if outcome.passes else "",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1] / "models" / "demo")
    parser.add_argument("--size", type=int, default=4, help="ranks of the group")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, list[str]] = {load: [] for load in BURSTS}
    for repeat in range(arguments.repeats):
        for name, flags in VARIANTS.items():
            for load, outcome in run_variant(flags, arguments, arguments.seed + 100 * repeat).items():
                rows[load].append(row(name, outcome))
                print(f"{load}: {rows[load][-1]}", flush=True)
    parts = [
        f"{arguments.size} ranks, {arguments.requests} requests at {arguments.rate:g} per second, "
        f"{arguments.repeats} repeats in turns. "
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores."
    ]
    parts += [f"\n## Arrivals {load}\n\n{HEAD}\n" + "\n".join(lines) for load, lines in rows.items()]
    publish("\n".join(parts) + "\n", arguments.write)


if __name__ == "__main__":
    main()
