"""`kvrelay simulate`: replays a trace on a simulated fleet in virtual time."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from kvrelay.device_profiles import BUILT_IN, Profile, UnknownProfile, find_profile
from kvrelay.flag_parser import CommandFailed, FlagParser, number, objective, result_file, whole
from kvrelay.scheduler_names import check_scheduler_name
from kvrelay.scheduling.scheduler_settings import QueueOrderName
from kvrelay_bench.traces import TracedRequest, read_trace, scaled
from kvrelay_router.routing.policy import PolicyName
from kvrelay_simulator.fleet import FleetSettings, SimulatedFleet
from kvrelay_simulator.results import (
    RunFigures,
    RunResult,
    RunSlo,
    Times,
    best_possible_hit_rate,
    check_plot,
    draw_runs,
    figures,
)
from kvrelay_simulator.workers import WorkerSettings

COLUMNS: list[tuple[str, Callable[[RunFigures], str]]] = [
    ("TTFT p50", lambda f: f"{f.ttft_p50_s:.3f}"),
    ("p90", lambda f: f"{f.ttft_p90_s:.3f}"),
    ("p99", lambda f: f"{f.ttft_p99_s:.3f}"),
    ("TPOT p50", lambda f: f"{1e3 * f.tpot_p50_s:.1f}"),
    ("p99", lambda f: f"{1e3 * f.tpot_p99_s:.1f}"),
    ("goodput", lambda f: f"{f.goodput:.2f}"),
    ("good", lambda f: f"{f.good_share:.1%}"),
    ("hit rate", lambda f: f"{f.hit_rate:.1%}"),
    ("of best", lambda f: f"{f.hit_share:.1%}" if f.can_hit else "-"),
    ("P busy", lambda f: f"{f.prefill_utilisation:.0%}"),
    ("D busy", lambda f: f"{f.decode_utilisation:.0%}"),
]
PROFILES = (
    f"{', '.join(BUILT_IN)}, other numbers of devices of these as in llama3-70b-h100-tp4-pp2, or a JSON file "
    "(default: llama3-8b-h100)"
)
NO_HITS = "No hits are possible: no prompt begins with a whole block of an earlier one."
ADVICE = {
    "--routing-policy": "write --policy NAME",
    "--token-budget": "the roles have their own: --prefill-token-budget, --decode-token-budget",
}
"""Flags of other commands."""


def simulate(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status. Raises CommandFailed."""
    arguments = simulate_parser().parse(argv)
    slo = _slo(arguments.slo)
    try:
        _check(arguments)
        requests = read_trace(arguments.trace, arguments.requests, rate=arguments.rate, seed=arguments.seed)
        trace = scaled(requests, arguments.speed)
        runs = _runs(arguments, _settings(arguments, trace))
        results = [_run(name, settings, trace, slo) for name, settings in runs]
    except ValueError as error:
        raise CommandFailed(str(error), 2) from None
    print(table(results))
    print(f"TTFT in seconds, TPOT in milliseconds, goodput in requests per second with {slo}.")
    if not any(result.figures.can_hit for result in results):
        print(NO_HITS)
    ratios = [result for result in results if result.num_prefill]
    best = max(ratios, key=lambda result: (result.figures.goodput, -result.figures.ttft_p90_s)) if ratios else None
    if arguments.sweep and best is not None:
        print(f"Best ratio by goodput: {best.name}")
    if arguments.json is not None:
        content: dict[str, Any] = {
            "arguments": _printable(arguments),
            "runs": {each.name: each.figures.as_json() for each in results},
        }
        if arguments.sweep and best is not None:
            content["best_ratio"] = best.name
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        draw_runs(results, slo, arguments.plot, _title(arguments, len(trace)))
    return 0


def _slo(bounds: Sequence[tuple[str, float]] | None) -> RunSlo:
    """The bounds that are given, or else the default ones."""
    if not bounds:
        return RunSlo()
    given = dict(bounds)
    return RunSlo(given.get("ttft", math.inf), given.get("tpot", math.inf))


def _title(arguments: argparse.Namespace, num_requests: int) -> str:
    """The load and the devices, for plots."""
    profile = Path(arguments.profile).stem if arguments.profile.endswith(".json") else arguments.profile
    if arguments.decode_profile is not None:
        profile += f", decode {arguments.decode_profile}"
    total = arguments.prefill + arguments.decode
    fleet = f"{total} workers" if arguments.sweep else f"{arguments.prefill} prefill, {arguments.decode} decode"
    speed = "" if arguments.speed == 1 else f" x{arguments.speed:g}"
    return f"{arguments.trace.name}{speed}, {num_requests} requests; {profile}; {fleet}"


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError."""
    total = arguments.prefill + arguments.decode
    if total < 1:
        raise ValueError("--prefill and --decode: at least one worker is needed")
    if arguments.sweep and (total < 2 or not arguments.decode):
        raise ValueError("--sweep needs two workers or more, and --decode above 0")
    if arguments.sweep and len(arguments.policy or ()) > 1:
        raise ValueError("--sweep compares ratios: give one --policy")
    if arguments.plot is not None:
        check_plot(arguments.plot)


def table(results: Sequence[RunResult]) -> str:
    """A table with one line per run."""
    rows = [["", *(name for name, _ in COLUMNS)]]
    rows += [[each.name, *(show(each.figures) for _, show in COLUMNS)] for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _runs(arguments: argparse.Namespace, base: FleetSettings) -> list[tuple[str, FleetSettings]]:
    total, policies = base.num_prefill + base.num_decode, arguments.policy or ["cost"]
    if arguments.sweep:
        base = replace(base, policy=policies[0])
        runs = [
            (f"{n} prefill, {total - n} decode", replace(base, num_prefill=n, num_decode=total - n))
            for n in range(1, total)
        ]
        return [*runs, ("colocated", replace(base, num_prefill=0, num_decode=total))] if arguments.colocated else runs
    runs = [(policy, replace(base, policy=policy)) for policy in policies]
    if arguments.colocated:
        runs += [(f"{name}, colocated", replace(each, num_prefill=0, num_decode=total)) for name, each in runs]
    return runs


def _run(name: str, settings: FleetSettings, trace: Sequence[TracedRequest], slo: RunSlo) -> RunResult:
    fleet = SimulatedFleet(settings)
    requests = fleet.run(trace, _progress(name))
    fleet.check_integrity()
    size = settings.workers.block_size
    num_blocks = sum(worker.pool.num_blocks for worker in fleet.workers.values())
    best = best_possible_hit_rate((request.tokens() for request in trace), size, num_blocks)
    return RunResult(name, settings.num_prefill, figures(fleet, requests, slo, best), Times.of(requests))


def _progress(name: str) -> Callable[[float], None]:
    """Shows progress: on a terminal in one line, else one line per tenth."""
    if sys.stderr.isatty():

        def rewrite(share: float) -> None:
            end = "\n" if share >= 1 else ""
            print(f"\r{name}: {share:4.0%}", end=end, file=sys.stderr, flush=True)

        return rewrite
    reported = [0]

    def write(share: float) -> None:
        if int(share * 10) > reported[0]:
            reported[0] = int(share * 10)
            print(f"{name}: {reported[0]}0%", file=sys.stderr, flush=True)

    return write


def _settings(arguments: argparse.Namespace, trace: Sequence[TracedRequest]) -> FleetSettings:
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    workers = WorkerSettings(
        block_size=arguments.block_size,
        prefill_token_budget=arguments.prefill_token_budget,
        decode_token_budget=arguments.decode_token_budget,
        max_running=arguments.max_running,
        max_model_len=longest + 1,
        scheduler=check_scheduler_name(arguments.scheduler),
        queue_order=arguments.queue_order,
    )
    profile, decode_profile = _profile("--profile", arguments.profile), None
    if arguments.decode_profile is not None:
        decode_profile = _profile("--decode-profile", arguments.decode_profile)
        if decode_profile.kv_bytes_per_token != profile.kv_bytes_per_token:
            raise ValueError(
                f"--decode-profile {decode_profile.name}: its KV is not that of --profile {profile.name}: both need "
                f"the same model"
            )
    return FleetSettings(
        profile=profile,
        decode_profile=decode_profile,
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        local_prefill_tokens=arguments.local_prefill_tokens,
        has_index=not arguments.no_index,
        workers=workers,
    )


def _profile(flag: str, name: str) -> Profile:
    """Raises ValueError."""
    try:
        return find_profile(name)
    except UnknownProfile as error:
        raise ValueError(f"{flag} {name}: {error}") from None


def simulate_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay simulate",
        "Replays a trace on simulated devices in virtual time, with the real schedulers, caches, routing and "
        "admission, and a cost model instead of forward and transfer.",
        usage="kvrelay simulate --trace FILE [flags]",
        advice=ADVICE,
    )
    _add_load_flags(parser)
    _add_fleet_flags(parser)
    _add_worker_flags(parser)
    add = parser.add_argument_group("results").add_argument
    add(
        "--slo",
        type=objective("ttft", "tpot"),
        action="append",
        metavar="NAME=TIME",
        help="bound of a good request: ttft or tpot, as in ttft=2s; repeat for both (default: ttft=2s and tpot=50ms)",
    )
    add("--json", type=result_file, metavar="FILE", help="also write the figures to this file")
    add("--plot", type=result_file, metavar="FILE", help="also draw the figures (.svg, .png, .pdf); needs matplotlib")
    return parser


def _add_load_flags(parser: FlagParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="Mooncake's JSON lines, Azure's CSV, or conversations (ShareGPT, MT-Bench, Alpaca, lines with `messages`)",
    )
    add("--requests", type=whole(1, 1 << 24), metavar="N", help="only the first N requests (default: all)")
    add("--speed", type=number(1e-6, 1e6), default=1.0, metavar="X", help="speed-up of arrivals (default: 1)")
    add(
        "--rate",
        type=number(1e-6, 1e6),
        metavar="R",
        help="requests per second of a file of conversations, which has no arrivals (default: 1)",
    )
    add("--seed", type=whole(0, 1 << 31), default=1, metavar="N", help="seed of arrivals of conversations (default: 1)")


def _add_fleet_flags(parser: FlagParser) -> None:
    add = parser.add_argument_group("fleet").add_argument
    add("--prefill", type=whole(0, 1 << 16), default=2, metavar="N", help="prefill workers (default: 2)")
    add(
        "--decode",
        type=whole(0, 1 << 16),
        default=2,
        metavar="N",
        help="decode workers; 0: requests end at the first token (default: 2)",
    )
    add("--profile", default="llama3-8b-h100", metavar="NAME", help=PROFILES)
    add(
        "--decode-profile",
        metavar="NAME",
        help="profile of decode workers, of the same model (default: as --profile)",
    )
    policies = get_args(PolicyName)
    add(
        "--policy",
        action="append",
        choices=policies,
        metavar="NAME",
        help=f"routing policy: {', '.join(policies)}; repeat to compare (default: cost)",
    )
    add("--colocated", action="store_true", help="also run all devices as decode workers")
    add("--sweep", action="store_true", help="run all ratios of prefill to decode with the same total; name the best")
    add("--no-index", action="store_true", help="no prefix index; routing knows only what it sent where")
    add(
        "--local-prefill-tokens",
        type=whole(0, 1 << 24),
        metavar="N",
        help="prompts up to this length go to decode alone (default: by cost)",
    )


def _add_worker_flags(parser: FlagParser) -> None:
    add = parser.add_argument_group("workers").add_argument
    add("--scheduler", default="sarathi", metavar="NAME", help="scheduler of the workers (default: sarathi)")
    add(
        "--queue-order",
        choices=get_args(QueueOrderName),
        default="fcfs",
        metavar="NAME",
        help=f"queue order of the workers: {', '.join(get_args(QueueOrderName))} (default: fcfs)",
    )
    tokens = whole(1, 1 << 30)
    add("--block-size", "--page-size", type=tokens, default=64, metavar="N", help="tokens per block (default: 64)")
    add(
        "--prefill-token-budget",
        type=tokens,
        default=2048,
        metavar="N",
        help="maximum tokens of a prefill step (default: 2048)",
    )
    add(
        "--decode-token-budget",
        type=tokens,
        default=512,
        metavar="N",
        help="maximum tokens of a decode step (default: 512)",
    )
    add(
        "--max-running",
        "--max-num-seqs",
        "--max-running-requests",
        type=tokens,
        default=256,
        metavar="N",
        help="maximum running sequences per worker (default: 256)",
    )


def _printable(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
