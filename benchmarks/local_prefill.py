"""What decode workers gain and lose by computing prompts: all handed off, as the policy `cost` decides, and colocated.

Virtual time (`kvrelay simulate`): real schedulers, caches, load counting and policy on the same number of simulated
devices, so nothing depends on the machine. A trace runs at several speeds. Good: TTFT and TPOT within the SLO.

Usage: python -m benchmarks.local_prefill --trace FILE ... [--rates 1,2] [--ratios 1:1,2:2] [--tpot-ms 50]
    [--write FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulated_runs import measure_all, parser_of, publish
from kvrelay.simulated.profiles import find_profile
from kvrelay_simulator.fleet import FleetSettings, SimulatedFleet
from kvrelay_simulator.results import RunFigures, RunSlo, figures
from kvrelay_simulator.traces import TracedRequest, read_trace, scaled


@dataclass(frozen=True, slots=True)
class Run:
    """One fleet on one trace at one speed."""

    trace_name: str
    rate: float
    trace: Sequence[TracedRequest]
    ratio: tuple[int, int]
    profile: str
    slo: RunSlo
    name: str

    @property
    def title(self) -> str:
        per_second = len(self.trace) / self.trace[-1].arrival_s
        return f"{self.trace_name}, {per_second:.1f} requests/s, {self.ratio[0]} prefill and {self.ratio[1]} decode"

    def measure(self) -> RunFigures:
        num_prefill, num_decode = (0, sum(self.ratio)) if self.name == "colocated" else self.ratio
        limit = 0 if self.name == "all handed off" else None
        settings = FleetSettings(find_profile(self.profile), num_prefill, num_decode, local_prefill_tokens=limit)
        fleet = SimulatedFleet(settings)
        requests = fleet.run(self.trace)
        fleet.check_integrity()
        return figures(fleet, requests, self.slo, 0.0)


def runs(arguments: argparse.Namespace) -> list[Run]:
    ratios = [tuple(int(part) for part in ratio.split(":")) for ratio in arguments.ratios.split(",")]
    return [
        Run(
            file.name,
            rate,
            scaled(read_trace(file, arguments.requests), rate),
            (ratio[0], ratio[1]),
            arguments.profile,
            RunSlo(arguments.ttft_s, arguments.tpot_ms / 1e3),
            name,
        )
        for file in arguments.trace
        for rate in [float(each) for each in arguments.rates.split(",")]
        for ratio in ratios
        for name in ("all handed off", "by expected latency", "colocated")
    ]


def report(results: Sequence[tuple[Run, RunFigures]], arguments: argparse.Namespace) -> str:
    lines = [
        "# Prompts that decode computes",
        "",
        f"Simulated devices of the profile `{arguments.profile}` in virtual time. Repeat with "
        "`python -m benchmarks.local_prefill --trace FILE`; the script's head says what is measured. *All handed off* "
        "is `local_prefill_tokens = 0`, *by expected latency* is the default, *colocated* has as many workers that do "
        "both. "
        f"Good: TTFT within {arguments.ttft_s:g} s and TPOT within {arguments.tpot_ms:g} ms. TTFT in seconds, TPOT in "
        "milliseconds.",
    ]
    for title in dict.fromkeys(run.title for run, _ in results):
        lines += ["", f"## {title}", ""]
        lines += ["| prompts | good | TTFT p50 | p90 | p99 | TPOT p50 | p99 | prefill busy | decode busy |"]
        lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
        for run, f in results:
            if run.title == title:
                lines.append(
                    f"| {run.name} | {f.good_share:.1%} | {f.ttft_p50_s:.3f} | {f.ttft_p90_s:.3f} | {f.ttft_p99_s:.3f} "
                    f"| {f.tpot_p50_s * 1e3:.1f} | {f.tpot_p99_s * 1e3:.1f} | {f.prefill_utilisation:.0%} "
                    f"| {f.decode_utilisation:.0%} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", default="1", help="speeds of the trace")
    parser.add_argument("--ratios", default="2:2", help="prefill to decode workers")
    parser.add_argument("--ttft-s", type=float, default=RunSlo().ttft_s)
    parser.add_argument("--tpot-ms", type=float, default=RunSlo().tpot_s * 1e3)
    arguments = parser.parse_args()
    results = measure_all(
        runs(arguments), arguments.processes, lambda run, f: f"{run.title}: {run.name}: {f.good_share:.1%} good"
    )
    publish(report(results, arguments), arguments.write)


if __name__ == "__main__":
    main()
