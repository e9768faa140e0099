"""`kvrelay bench --workload`: programs per second, latency and cache hits of the workloads of `kvrelay_programs`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from kvrelay.flag_parser import CommandFailed, FlagParser, result_file, whole
from kvrelay_bench.flags import api_key
from kvrelay_bench.report import report_console
from kvrelay_programs import Endpoint, State
from kvrelay_programs.workloads import Workload, find_workload, workloads

SWITCHES = ("fork-hint", "parallel")
"""What can be left out of a run, each as a variant beside the complete one."""


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The checked flags. `left_out` has the switches of each variant; that of "all on" is empty."""

    url: str
    model: str | None
    api_key: str | None
    workloads: Sequence[Workload]
    left_out: Mapping[str, frozenset[str]]
    num_programs: int
    concurrency: int
    rounds: int
    seed: int
    json_path: Path | None


@dataclass(frozen=True, slots=True)
class ProgramFigures:
    """One variant of a workload in one round. Times in seconds; `hit_rate`: cached prompt tokens / prompt tokens."""

    workload: str
    variant: str
    round: int
    num_programs: int
    num_failed: int
    programs_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    calls: int
    prompt_tokens: int
    completion_tokens: int
    hit_rate: float
    first_error: str | None


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if no program of a variant succeeded. Raises CommandFailed."""
    try:
        plan = read_plan(argv)
    except ValueError as error:
        raise CommandFailed(str(error), 2) from None
    results: list[ProgramFigures] = []
    is_interrupted = False
    try:
        for each in measured(plan):
            results.append(each)
    except KeyboardInterrupt:
        is_interrupted = True
        print("kvrelay bench: interrupted: figures of the rounds before", file=sys.stderr)
    console = report_console()
    for workload in plan.workloads:
        if rows := [each for each in results if each.workload == workload.name]:
            console.print(_table(workload, rows))
    for message in dict.fromkeys(each.first_error for each in results if each.first_error):
        console.print(f"- failed: {message}", highlight=False, markup=False)
    if plan.json_path is not None:
        content = [asdict(each) for each in results]
        plan.json_path.write_text(json.dumps({"version": 1, "programs": content}, indent=1) + "\n", encoding="utf-8")
    if is_interrupted:
        return 130
    return 0 if all(each.num_failed < each.num_programs for each in results) else 1


def measured(plan: ProgramPlan) -> Iterator[ProgramFigures]:
    """Runs all variants in turns, whose order alternates between rounds. Each has texts of its own."""
    endpoint = Endpoint(plan.url, model=plan.model, api_key=plan.api_key)
    for workload in plan.workloads:
        for number in range(plan.rounds):
            variants = list(plan.left_out.items())
            for variant, left_out in variants if number % 2 == 0 else variants[::-1]:
                yield _measure(plan, endpoint, workload, variant, left_out, number)


def _measure(
    plan: ProgramPlan, endpoint: Endpoint, workload: Workload, variant: str, left_out: frozenset[str], number: int
) -> ProgramFigures:
    # The same lengths for all variants would need the same texts, which the cache would then have.
    seed = plan.seed * 1_000_003 + number * 1009 + list(plan.left_out).index(variant)
    arguments = workload.draw(plan.num_programs, seed)
    begin = time.perf_counter()
    states = workload.program.run_batch(
        arguments,
        endpoint=endpoint,
        sampling={"temperature": 0},
        num_threads=plan.concurrency,
        parallel="parallel" not in left_out,
        fork_hint="fork-hint" not in left_out,
        on_error="keep",
    )
    return _figures(workload.name, variant, number, states, time.perf_counter() - begin)


def _figures(workload: str, variant: str, number: int, states: Sequence[State], elapsed_s: float) -> ProgramFigures:
    errors = [state.error for state in states if state.error is not None]
    latencies = [state.elapsed_s for state in states if state.error is None and state.elapsed_s is not None]
    prompt_tokens = sum(state.usage.prompt_tokens for state in states)
    return ProgramFigures(
        workload=workload,
        variant=variant,
        round=number,
        num_programs=len(states),
        num_failed=len(errors),
        programs_per_s=(len(states) - len(errors)) / elapsed_s,
        latency_p50_s=float(np.percentile(latencies, 50)) if latencies else float("nan"),
        latency_p99_s=float(np.percentile(latencies, 99)) if latencies else float("nan"),
        calls=sum(state.usage.calls for state in states),
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(state.usage.completion_tokens for state in states),
        hit_rate=sum(state.usage.cached_tokens for state in states) / max(prompt_tokens, 1),
        first_error=str(errors[0]) if errors else None,
    )


def _table(workload: Workload, results: Sequence[ProgramFigures]) -> Table:
    """Medians over the rounds; ratios are taken within a round, against the complete variant."""
    table = Table(title=f"{workload.name} ({workload.shares})", title_justify="left")
    for column in ("variant", "programs/s", "/ all on", "latency p50, s", "p99, s", "calls", "hit rate", "failed"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    complete = {each.round: each.programs_per_s for each in results if each.variant == "all on"}
    for variant in dict.fromkeys(each.variant for each in results):
        rows = [each for each in results if each.variant == variant]
        ratios = [each.programs_per_s / complete[each.round] for each in rows if complete.get(each.round)]
        table.add_row(
            variant,
            f"{median(each.programs_per_s for each in rows):.2f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "",
            f"{median(each.latency_p50_s for each in rows):.3f}",
            f"{median(each.latency_p99_s for each in rows):.3f}",
            f"{median(each.calls for each in rows):.0f}",
            f"{median(each.hit_rate for each in rows):.3f}",
            f"{sum(each.num_failed for each in rows)}",
        )
    return table


def read_plan(argv: Sequence[str]) -> ProgramPlan:
    """Parses the flags. Raises ValueError; exits the process like argparse."""
    given: Any = programs_parser().parse(argv)
    names = list(workloads()) if given.workload == "all" else given.workload.split(",")
    left_out = {"all on": frozenset[str]()}
    for switch in filter(None, given.without.split(",")):
        if switch not in SWITCHES:
            raise ValueError(f"--without takes {', '.join(SWITCHES)}, not {switch!r}")
        left_out[f"without {switch}"] = frozenset({switch})
    if len(left_out) > 2:
        left_out["without all of these"] = frozenset(SWITCHES)
    return ProgramPlan(
        url=given.url,
        model=given.model,
        api_key=api_key(given.api_key_file, os.environ) or None,
        workloads=[find_workload(name) for name in names],
        left_out=left_out,
        num_programs=given.programs,
        concurrency=given.concurrency,
        rounds=given.rounds,
        seed=given.seed,
        json_path=given.json,
    )


def programs_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay bench --workload",
        "Runs programs of several calls.",
        usage="kvrelay bench URL --workload NAME [flags]",
    )
    add = parser.add_argument
    add("url", metavar="URL", help="base URL of the endpoint")
    add("--workload", required=True, metavar="NAME[,NAME]", help=f"all, or {', '.join(workloads())}")
    add("--programs", type=whole(1, 1 << 24), default=32, metavar="N", help="programs of each round (default: 32)")
    add(
        "--concurrency",
        type=whole(1, 1 << 20),
        default=16,
        metavar="N",
        help="programs at a time; 1 for the latency of one alone (default: 16)",
    )
    add("--rounds", type=whole(1, 1000), default=1, metavar="N", help="repetitions (default: 1)")
    add("--without", default="", metavar="SWITCH[,SWITCH]", help=f"also without {' or '.join(SWITCHES)}")
    add("--seed", type=whole(0, 1 << 31), default=0, metavar="N", help="seed of the programs' texts (default: 0)")
    add("--model", metavar="NAME", help="(default: the first one that /v1/models names)")
    add("--api-key-file", type=Path, metavar="FILE", help="(default: KVRELAY_API_KEY or OPENAI_API_KEY, if set)")
    add("--json", type=result_file, metavar="FILE", help="write all figures to this file")
    return parser
