"""Routing policies on simulated prefill workers: hit rate against the best possible, and time to first token.

Virtual time (`kvrelay simulate`): real schedulers, caches, router view, load counting and policies; every request ends
at its first token, as only prefill is compared. The index is up to date; load reports come once a second.

Saturation is measured first: all requests at once, in turn (`round_robin`), requests over the time until the last is
done. Each policy then gets the trace at fixed fractions of it (arrival times scaled, so bursts stay bursts). Synthetic
cases follow, each at 70% of its own saturation: prompts that share nothing, one hot prefix of 8,192 tokens and one of
20,480, and agents whose turns grow, of two kinds.

- hits: prompt tokens found cached. Share: hits over those of one cache for the whole fleet, of the same total size,
  least recently used out first, with every prompt there from its arrival on.
- TTFT in seconds from arrival, in virtual time.

Usage: python -m benchmarks.routing --trace FILE [--trace FILE ...] [--workers 8] [--requests N] [--write FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from benchmarks.simulated_runs import measure_all, parser_of, publish
from kvrelay.device_profiles import find_profile
from kvrelay_bench.traces import TracedRequest, agent_sessions, cold_starts, one_hot_prefix, read_trace, scaled
from kvrelay_router.routing.policy import PolicyName
from kvrelay_simulator.fleet import FleetSettings, SimulatedFleet
from kvrelay_simulator.results import RunFigures, RunSlo, best_possible_hit_rate, figures
from kvrelay_simulator.workers import WorkerSettings

FRACTIONS = (0.3, 0.5, 0.7, 0.85, 0.95)
CASE_FRACTION = 0.7
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace."""

    title: str
    policy: PolicyName
    trace: Sequence[TracedRequest]
    workers: int
    profile: str

    def measure(self) -> RunFigures:
        settings = FleetSettings(find_profile(self.profile), self.workers, 0, self.policy)
        fleet = SimulatedFleet(settings)
        requests = fleet.run(self.trace)
        fleet.check_integrity()
        num_blocks = sum(worker.pool.num_blocks for worker in fleet.prefill)
        best = best_possible_hit_rate(
            (request.tokens() for request in self.trace), WorkerSettings().block_size, num_blocks
        )
        return figures(fleet, requests, RunSlo(), best)


def saturation(trace: Sequence[TracedRequest], arguments: argparse.Namespace) -> float:
    """Requests a second that the fleet ends when all of them are there from the start."""
    at_once = [replace(request, arrival_s=0.0) for request in trace]
    found = Run("", "round_robin", at_once, arguments.workers, arguments.profile).measure()
    return len(trace) / found.seconds


def at_fraction(trace: Sequence[TracedRequest], fraction: float, saturated: float) -> list[TracedRequest]:
    """The trace, arriving at this fraction of the saturation."""
    rate = len(trace) / trace[-1].arrival_s
    return scaled(trace, fraction * saturated / rate)


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    for file in arguments.trace:
        trace = read_trace(file, arguments.requests)
        saturated = saturation(trace, arguments)
        for fraction in FRACTIONS:
            title = f"{file.name} at {fraction:.0%} of {saturated:.1f} requests/s"
            for policy in POLICIES:
                yield Run(title, policy, at_fraction(trace, fraction, saturated), arguments.workers, arguments.profile)
    cases = {
        "prompts that share nothing": cold_starts(800, 10.0),
        "one hot prefix of 8,192 tokens": one_hot_prefix(3000, 10.0),
        "one hot prefix of 20,480 tokens, 1,536 of one's own": one_hot_prefix(3000, 10.0, prefix=40, tail=3, seed=5),
        "agents, 12 turns a session": agent_sessions(150, 1.0, seed=2),
        "agents, 6 turns a session": agent_sessions(400, 4.0, num_turns=6, think_s=10.0, seed=7),
    }
    for name, case in cases.items():
        limit = saturation(case, arguments)
        title = f"{name}, at {CASE_FRACTION:.0%} of {limit:.1f} requests/s"
        for policy in POLICIES:
            yield Run(title, policy, at_fraction(case, CASE_FRACTION, limit), arguments.workers, arguments.profile)


def report(results: Sequence[tuple[Run, RunFigures]], arguments: argparse.Namespace) -> str:
    lines = [
        "# Routing policies",
        "",
        f"Simulated: {arguments.workers} prefill workers of the profile `{arguments.profile}`, in virtual time, so "
        "nothing depends on the machine.",
        "Repeat with `python -m benchmarks.routing --trace FILE`; the script's head says what is measured. TTFT in "
        "seconds; *within* is TTFT p90 against the best policy's in the same table (1.00 is the best). The weights "
        "of `cost` were chosen on ten minutes of Mooncake's conversation trace and on agents' turns (the tau-bench "
        "trace of LMCache). The other traces and cases showed faults of the policy's form; no weight was fitted to "
        "them. The other policies have nothing to choose. One trace is one sample: neighbouring weights move TTFT "
        "p90 by up to 8% and the share of hits by up to five points, as the bursts fall otherwise.",
        "",
        "`sticky` goes by the prompt's first 512 tokens where there is no session, and in the conversation trace all "
        "prompts share those; `prefix_only` follows them too: both send everything to one worker there.",
    ]
    for title in dict.fromkeys(run.title for run, _ in results):
        found = {run.policy: figures for run, figures in results if run.title == title}
        best = min(each.ttft_p90_s for each in found.values())
        lines += ["", f"## {title}", ""]
        lines += ["| policy | hits | best possible | share | TTFT p50 | p90 | p99 | within | busy |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
        for policy, f in found.items():
            share = f"{f.hit_share:.1%}" if f.best_hit_rate else "-"
            lines.append(
                f"| `{policy}` | {f.hit_rate:.1%} | {f.best_hit_rate:.1%} | {share} | {f.ttft_p50_s:.3f} "
                f"| {f.ttft_p90_s:.3f} | {f.ttft_p99_s:.3f} | {f.ttft_p90_s / best:.2f} "
                f"| {f.prefill_utilisation:.0%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    results = measure_all(list(runs(arguments)), arguments.processes, _told)
    publish(report(results, arguments), arguments.write)


def _told(run: Run, found: RunFigures) -> str:
    share = f"share {found.hit_share:.3f}" if found.best_hit_rate else "no hits possible"
    return f"{run.title}: {run.policy}: TTFT p90 {found.ttft_p90_s:.3f}, {share}"


if __name__ == "__main__":
    main()
