"""When separate prefill and decode workers serve more requests within their bounds than as many that do both.

Virtual time (`kvrelay simulate`): real schedulers, caches, load counting and policy on the same number of simulated
devices, so nothing depends on the machine. Each trace runs at several speeds through every ratio of prefill to decode
workers, once with prompts placed by expected latency (the default) and once with all prompts handed off, and through as
many workers that do both. One run gives the share of good requests for every bound of TPOT, the mean of a request, and
of its longest gap between two tokens.

Usage: python -m benchmarks.disaggregation --trace FILE ... [--rates 0.5,1] [--devices 4] [--write FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_runs import parser_of, publish
from kvrelay.device_profiles import find_profile
from kvrelay_bench.traces import TracedRequest, read_trace, scaled
from kvrelay_simulator.fleet import FleetSettings, SimulatedFleet
from kvrelay_simulator.results import RunSlo, Times, figures

TPOT_BOUNDS_MS = (50, 25, 15)
GAP_BOUNDS_MS = (100, 50, 25)
MODES = {"by expected latency": None, "all handed off": 0}
"""`local_prefill_tokens` by name."""


@dataclass(frozen=True, slots=True)
class Run:
    """One fleet on one trace at one speed. Without prefill workers all workers do both."""

    trace_name: str
    trace: Sequence[TracedRequest]
    ratio: tuple[int, int]
    mode: str
    profile: str
    ttft_s: float

    @property
    def load(self) -> str:
        per_second = len(self.trace) / self.trace[-1].arrival_s
        return f"{self.trace_name}, {per_second:.1f} requests/s, {sum(self.ratio)} devices"

    @property
    def name(self) -> str:
        num_prefill, num_decode = self.ratio
        return f"{num_prefill}:{num_decode}, {self.mode}" if num_prefill else f"{num_decode} that do both"


@dataclass(frozen=True, slots=True)
class Found:
    """Shares of good requests by the bounds of TPOT, then of gaps; percentiles, and the workers' utilisation."""

    good: tuple[float, ...]
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    prefill_utilisation: float
    decode_utilisation: float


def measure(run: Run) -> Found:
    settings = FleetSettings(find_profile(run.profile), *run.ratio, local_prefill_tokens=MODES[run.mode])
    fleet = SimulatedFleet(settings)
    requests = fleet.run(run.trace)
    fleet.check_integrity()
    each = [figures(fleet, requests, RunSlo(run.ttft_s, bound / 1e3), 0.0) for bound in TPOT_BOUNDS_MS]
    times = Times.of(requests)
    gaps = np.array([request.longest_gap_s for request in requests])
    good = [one.good_share for one in each]
    good += [float(((times.ttft_s <= run.ttft_s) & (gaps <= bound / 1e3)).mean()) for bound in GAP_BOUNDS_MS]
    return Found(
        good=tuple(good),
        ttft_p50_s=float(np.percentile(times.ttft_s, 50)),
        ttft_p90_s=each[0].ttft_p90_s,
        tpot_p50_s=each[0].tpot_p50_s,
        tpot_p99_s=each[0].tpot_p99_s,
        gap_p50_s=float(np.percentile(gaps, 50)),
        gap_p99_s=float(np.percentile(gaps, 99)),
        prefill_utilisation=each[0].prefill_utilisation,
        decode_utilisation=each[0].decode_utilisation,
    )


def runs(arguments: argparse.Namespace) -> list[Run]:
    total = arguments.devices
    fleets = [((0, total), "by expected latency")]
    fleets += [((prefill, total - prefill), mode) for prefill in range(1, total) for mode in MODES]
    return [
        Run(file.name, scaled(read_trace(file, arguments.requests), rate), ratio, mode, arguments.profile, slo)
        for slo in [arguments.ttft_s]
        for file in arguments.trace
        for rate in [float(each) for each in arguments.rates.split(",")]
        for ratio, mode in fleets
    ]


def report(results: Sequence[tuple[Run, Found]], arguments: argparse.Namespace) -> str:
    lines = [
        "# Separate prefill and decode against workers that do both",
        "",
        f"Simulated devices of the profile `{arguments.profile}` in virtual time. Repeat with "
        "`python -m benchmarks.disaggregation --trace FILE`; the script's head says what is measured. *2:2* is two "
        "prefill and two decode workers. *By expected latency* is the default: decode also computes prompts if their "
        "first token is expected sooner there. *All handed off* is `local_prefill_tokens = 0`. Good: TTFT within "
        f"{arguments.ttft_s:g} s, and TPOT (mean of a request) or its longest gap between two tokens within the bound "
        "that the column names. **Bold**: the best of the column. TTFT in seconds, TPOT and gaps in milliseconds.",
    ]
    bounds = " | ".join(f"TPOT {bound}" for bound in TPOT_BOUNDS_MS) + " | "
    bounds += " | ".join(f"gap {bound}" for bound in GAP_BOUNDS_MS)
    num_bounds = len(TPOT_BOUNDS_MS) + len(GAP_BOUNDS_MS)
    for load in dict.fromkeys(run.load for run, _ in results):
        rows = [(run, found) for run, found in results if run.load == load]
        columns = [[found.good[column] for _, found in rows] for column in range(num_bounds)]
        best = [max(column) if len(set(column)) > 1 else None for column in columns]
        lines += ["", f"## {load}", ""]
        lines += [f"| workers | good: {bounds} | TTFT p50 | p90 | TPOT p50 | p99 | gap p50 | p99 | busy P, D |"]
        lines += ["|---|" + "--:|" * (num_bounds + 7)]
        for run, found in rows:
            good = " | ".join(
                f"**{share:.1%}**" if share == most else f"{share:.1%}"
                for share, most in zip(found.good, best, strict=True)
            )
            lines.append(
                f"| {run.name} | {good} | {found.ttft_p50_s:.2f} | {found.ttft_p90_s:.2f} "
                f"| {found.tpot_p50_s * 1e3:.1f} | {found.tpot_p99_s * 1e3:.1f} "
                f"| {found.gap_p50_s * 1e3:.0f} | {found.gap_p99_s * 1e3:.0f} "
                f"| {found.prefill_utilisation:.0%}, {found.decode_utilisation:.0%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", default="1", help="speeds of the trace")
    parser.add_argument("--devices", type=int, default=4, help="workers of each fleet")
    parser.add_argument("--ttft-s", type=float, default=RunSlo().ttft_s)
    arguments = parser.parse_args()
    results = []
    planned = runs(arguments)
    with ProcessPoolExecutor(arguments.processes) as pool:
        for run, found in zip(planned, pool.map(measure, planned), strict=True):
            results.append((run, found))
            print(f"{run.load}: {run.name}: {[f'{share:.1%}' for share in found.good]}", flush=True)
    publish(report(results, arguments), arguments.write)


if __name__ == "__main__":
    main()
