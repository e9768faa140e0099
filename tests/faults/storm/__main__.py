"""`python -m tests.faults.storm --requests 2000 --transport nixl --seed 7`: a long storm, with a report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.faults.storm.load import SAMPLES_SHARE
from tests.faults.storm.processes import StackSettings
from tests.faults.storm.schedule import WEIGHTS
from tests.faults.storm.storm import Report, StormOptions, run_storm


def main() -> int:
    flags = _parser().parse_args()
    settings = StackSettings(
        transport=flags.transport,
        dtype=flags.dtype,
        num_prefill=flags.prefill,
        num_decode=flags.decode,
        num_routers=flags.routers,
        peer_timeout_s=flags.peer_timeout_s,
        request_timeout_s=flags.request_timeout_s,
        max_attempts=flags.max_attempts,
        event_logs=flags.event_logs,
        extra={"prefill": flags.prefill_flag, "decode": flags.decode_flag, "router": flags.router_flag},
    )
    options = StormOptions(
        flags.requests,
        flags.seed,
        num_kinds=flags.kinds,
        concurrency=flags.concurrency,
        think_s=flags.think_s,
        at_a_time=flags.at_a_time,
        pause_s=flags.pause_s,
        kinds=tuple(flags.only or WEIGHTS),
        samples_share=flags.samples_share,
        constrained_share=flags.constrained_share,
        min_faults=flags.min_faults,
    )
    state_dir = flags.state_dir or Path(tempfile.mkdtemp(prefix="kvrelay-storm-"))
    print(f"logs: {state_dir}", flush=True)
    try:
        report = asyncio.run(run_storm(state_dir, settings, options, lambda line: print(line, flush=True)))
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    report.settings = vars(flags) | {"state_dir": str(state_dir)}
    print_report(report)
    if flags.json:
        flags.json.write_text(json.dumps(vars_of(report), default=str, indent=1))
    return 0


def vars_of(report: Report) -> dict[str, Any]:
    """As `dataclasses.asdict`, which in Python 3.11 spoils counters."""
    return {each.name: getattr(report, each.name) for each in fields(report)}


def print_report(report: Report) -> None:
    print(f"{report.took_s:.0f} s, the slowest request {report.slowest_s:.1f} s")
    for title, counts in (
        ("requests", report.requests),
        ("constrained outputs", report.constrained),
        ("faults", report.faults),
        ("totals", report.totals),
    ):
        print(f"{title}: " + ", ".join(f"{name} {count:g}" for name, count in sorted(counts.items())))
    for name, (before, after) in sorted(report.holdings.items()):
        print(f"{name} before: {before}, after: {after}")
    for error in report.errors:
        print(f"error answer: {error}")
    print("no output changed, nothing left behind, no request later than its deadline")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--dtype", default="", help="default: bfloat16, on CPUs with AMX float32")
    parser.add_argument("--transport", choices=["zmq", "nixl", "auto"], default="zmq")
    parser.add_argument("--seed", type=int, default=1, help="of the requests and of the faults")
    parser.add_argument("--kinds", type=int, default=150, help="distinct requests")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--think-s", type=float, default=1.0, help="a client's mean pause before a request")
    parser.add_argument("--at-a-time", type=int, default=2, help="faults at once")
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean pause before the next fault")
    parser.add_argument("--min-faults", type=int, default=0, help="send more requests until so many faults have begun")
    parser.add_argument("--only", nargs="+", choices=list(WEIGHTS), help="kinds of faults (default: all)")
    parser.add_argument("--samples-share", type=float, default=SAMPLES_SHARE, help="of the kinds: with n > 1")
    parser.add_argument("--constrained-share", type=float, default=0.0, help="of the kinds: with a grammar")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--peer-timeout-s", type=float, default=2.5)
    parser.add_argument("--request-timeout-s", type=float, default=90.0)
    parser.add_argument("--max-attempts", type=int, default=3)
    for role in ("prefill", "decode", "router"):
        parser.add_argument(
            f"--{role}-flag",
            action="append",
            default=[],
            metavar="FLAG",
            help=f"to every {role}; in the form --{role}-flag=--name=value",
        )
    parser.add_argument("--event-logs", action="store_true", help="keep what `kvrelay replay` reads, beside the logs")
    parser.add_argument("--state-dir", type=Path, help="for the logs (default: a new one)")
    parser.add_argument("--json", type=Path, help="also write the report there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
