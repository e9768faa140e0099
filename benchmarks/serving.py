"""Every scheduler through the whole system: `kvrelay up`, HTTP, one trace, one run.

Each case is a stack of its own (`kvrelay up` on this machine), and the cases take turns, `--repeats` times over.

- colocated: `--prefill 0 --decode 1`, one worker that does both phases; where the policies differ most.
- disaggregated: `--prefill 1 --decode 1`, with `--local-prefill-tokens 0`, or short prompts would stay on decode.

Two loads run on each: the trace (see `synthetic_load` and `traced_load` in client.py), and 16 sequences that decode
while a prompt of 1,000 to 8,000 tokens arrives.

- TTFT: from a request's arrival to its first token. TPOT: a request's mean gap between tokens. Worst gap: its longest.
- Throughput: prompt and output tokens over the time from the first arrival to the last token.
- Waste: token slots in the running sequences' blocks that hold nothing, as a share of all of theirs, in the mean over
  steps weighted by their time (of the workers' metrics files).

Usage: python -m benchmarks.serving [--trace FILE --speed 2] [--requests 150] [--repeats 3]
    [--write benchmarks/results/serving.md]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.client import Request, long_prompt_load, run_load, synthetic_load, traced_load
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.telemetry.metrics_file import StepRecord, read_metrics
from tests.fakes.stack import Stack

MODES = {
    "colocated": ("--prefill", "0", "--decode", "1"),
    "disaggregated": ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"),
}
LONG_PROMPTS = (1000, 2000, 4000, 8000)


@dataclass(frozen=True, slots=True)
class ServingCase:
    """What is compared: a name for each column that tells it apart, and the flags that make it."""

    names: tuple[str, ...]
    flags: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """One run of one case."""

    requests: list[Request]
    seconds: float
    steps: list[StepRecord]
    long: dict[int, list[Request]] = field(default_factory=dict)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return (self.num_prompt + sum(len(request.token_times_s) for request in self.requests)) / self.seconds

    @property
    def waste(self) -> float:
        allocated = sum(step.num_allocated_slots * step.forward_s for step in self.steps)
        committed = sum(step.num_committed_slots * step.forward_s for step in self.steps)
        return 1 - committed / allocated if allocated else 0.0


def scheduler_cases() -> list[ServingCase]:
    """All policies, in both modes."""
    policies: list[tuple[str, str]] = [("sarathi", "fixed"), ("sarathi", "dynamic")]
    policies += [(name, "fixed") for name in BUILT_IN if name != "sarathi"]
    return [
        ServingCase((mode, name, chunking), (*flags, "--scheduler", name, "--chunking", chunking))
        for mode, flags in MODES.items()
        for name, chunking in policies
    ]


def run_case(case: ServingCase, load: list[Request], arguments: argparse.Namespace) -> Outcome:
    """Starts the case's stack and runs the loads on it."""
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics"
        flags = [*case.flags, "--threads", str(arguments.threads), "--num-blocks", str(arguments.num_blocks)]
        flags += ["--token-budget", str(arguments.token_budget), "--max-running", "64", "--dtype", "float32"]
        flags += ["--metrics-file", str(metrics / "{worker_id}.jsonl"), *arguments.flag]
        with Stack(arguments.model, Path(directory) / "state", *flags) as stack:
            asyncio.run(run_load(stack.base_url, stack.model, synthetic_load(4, 20.0, seed=1), lambda _: None))
            requests = [request.fresh() for request in load]
            seconds = asyncio.run(run_load(stack.base_url, stack.model, requests, progress(len(load))))
            long = run_long_prompts(stack)
        steps = [record for path in metrics.iterdir() for record in read_metrics(path)]
    failed = [request.failed for request in requests if request.failed]
    if failed:
        raise SystemExit(f"{case.names}: {len(failed)} requests failed, the first one with: {failed[0]}")
    return Outcome(requests, seconds, [step for step in steps if isinstance(step, StepRecord)], long)


def run_long_prompts(stack: Stack) -> dict[int, list[Request]]:
    """One load after the other, by the long prompt's length."""
    loads = {length: long_prompt_load(length) for length in LONG_PROMPTS}
    for load in loads.values():
        asyncio.run(run_load(stack.base_url, stack.model, load, lambda _: None))
    return loads


def progress(total: int) -> Callable[[int], None]:
    """Shows how many requests have ended."""

    def show(ended: int) -> None:
        if ended % 10 == 0 or ended == total:
            print(f"\r  {ended} of {total}", end="" if ended < total else "\n", file=sys.stderr, flush=True)

    return show


# -- tables -----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 0) -> str:
    """The median over repeats, with the least and the most."""
    scaled = [scale * value for value in values]
    if len(scaled) == 1:
        return f"{scaled[0]:,.{digits}f}"
    return f"{np.median(scaled):,.{digits}f} ({min(scaled):,.{digits}f} to {max(scaled):,.{digits}f})"


def trace_row(outcomes: list[Outcome]) -> list[str]:
    """Percentiles of each repeat, then their median."""
    ttft = [[r.ttft_s for r in outcome.requests] for outcome in outcomes]
    gaps = [[r.gaps_s for r in outcome.requests if len(r.token_times_s) > 1] for outcome in outcomes]
    tpot = [[float(np.mean(each)) for each in of_run] for of_run in gaps]
    worst = [[max(each) for each in of_run] for of_run in gaps]
    return [
        spread([float(np.median(values)) for values in ttft]),
        spread([float(np.quantile(values, 0.99)) for values in ttft]),
        spread([float(np.median(values)) for values in tpot]),
        spread([float(np.quantile(values, 0.99)) for values in tpot]),
        spread([float(np.quantile(values, 0.99)) for values in worst]),
        spread([outcome.tokens_per_s for outcome in outcomes], 1),
        spread([outcome.waste for outcome in outcomes], 100, 1),
    ]


def long_row(outcomes: list[Outcome], length: int) -> list[str]:
    """Gaps of those that decoded."""
    gaps = [[gap for r in outcome.long[length][:-1] for gap in r.gaps_s] for outcome in outcomes]
    return [
        spread([float(np.quantile(values, 0.99)) for values in gaps]),
        spread([max(values) for values in gaps]),
        spread([outcome.long[length][-1].ttft_s for outcome in outcomes]),
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def full_step_ms(outcomes: list[Outcome], budget: int) -> float:
    """The median time of a step that spends the budget; NaN where there was none."""
    times = [step.forward_s for outcome in outcomes for step in outcome.steps if num_tokens(step) == budget]
    return 1e3 * float(np.median(times)) if times else float("nan")


def num_tokens(step: StepRecord) -> int:
    return step.num_prefill_tokens + step.num_decode_tokens


def scheduler_report(results: dict[ServingCase, list[Outcome]], arguments: argparse.Namespace) -> list[str]:
    names = ["mode", "scheduler", "chunks"]
    header = [*names, "TTFT p50", "p99", "TPOT p50", "p99", "worst gap p99", "tokens/s", "waste, %"]
    lines = ["## The trace", "", *table(header, [[*case.names, *trace_row(o)] for case, o in results.items()]), ""]
    lines += [f"## A prompt of {LONG_PROMPTS[0]:,} to {LONG_PROMPTS[-1]:,} tokens among 16 that decode", ""]
    sarathi = [o for case, o in results.items() if case.names == ("colocated", "sarathi", "fixed")]
    if sarathi:
        full = full_step_ms(sarathi[0], arguments.token_budget)
        lines += [f"Colocated sarathi with fixed chunks takes {full:.0f} ms for a step that spends the budget.", ""]
    header = [*names, "long prompt", "gap p99", "worst gap", "TTFT of the long prompt"]
    rows = [
        [*case.names, f"{length:,}", *long_row(outcomes, length)]
        for case, outcomes in results.items()
        for length in LONG_PROMPTS
    ]
    return [*lines, *table(header, rows), ""]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than the trace")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=10.0, help="synthetic requests a second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker's model")
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--token-budget", type=int, default=256)
    parser.add_argument("--only", nargs="+", help="cases one of whose names is among these")
    parser.add_argument("--flag", action="append", default=[], help="one more argument of `kvrelay up`; repeatable")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


def head(load: list[Request], arguments: argparse.Namespace) -> list[str]:
    name = f"{arguments.trace.name}, {arguments.speed:g} times as fast" if arguments.trace else "synthetic"
    return [
        "# Schedulers through the whole system",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores, {arguments.threads} thread(s) for each worker's model, "
        f"CPython {platform.python_version()}.",
        f"{len(load)} requests ({name}): {np.mean([len(r.prompt) for r in load]):.0f} prompt and "
        f"{np.mean([r.num_output for r in load]):.0f} output tokens in the mean. Token budget "
        f"{arguments.token_budget}, {arguments.num_blocks} blocks a worker,",
        f"{arguments.repeats} repeats in turn: medians, with the least and the most over the repeats. Milliseconds "
        "where nothing else is said.",
        "The script's head (`benchmarks/serving.py`) says what is measured.",
        "",
    ]


def main() -> None:
    arguments = parse_arguments()
    if arguments.trace:
        load = traced_load(arguments.trace, arguments.requests, arguments.speed)
    else:
        load = synthetic_load(arguments.requests, arguments.rate)
    cases = scheduler_cases()
    if arguments.only:
        cases = [case for case in cases if set(case.names) & set(arguments.only)]
    results: dict[ServingCase, list[Outcome]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):
        for case in cases:
            print(f"repeat {repeat + 1} of {arguments.repeats}: {' '.join(case.names)}", file=sys.stderr, flush=True)
            results[case].append(run_case(case, load, arguments))
    text = "\n".join([*head(load, arguments), *scheduler_report(results, arguments)])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
