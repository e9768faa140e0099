"""Programs per second and latency over the hit rate: a growing share of the programs has the same examples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.programs.calls import KeptCalls
from kvrelay_programs.workloads import find_workload

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WORKLOAD = "few-shot-20"


@dataclass(frozen=True, slots=True)
class Point:
    """Of the programs, `share` begin with the same examples. Times in seconds."""

    share: float
    hit_rate: float
    programs_per_s: float
    latency_s: float
    alone_s: float


def points(endpoint: KeptCalls, num_programs: int, concurrency: int, rounds: int) -> list[Point]:
    """Medians over the rounds."""
    found = [list(_measured(endpoint, share, num_programs, concurrency, rounds)) for share in SHARES]
    return [
        Point(share, *(median(getattr(each, field) for each in of_share) for field in Point.__match_args__[1:]))
        for share, of_share in zip(SHARES, found, strict=True)
    ]


def _measured(endpoint: KeptCalls, share: float, num_programs: int, concurrency: int, rounds: int) -> Iterator[Point]:
    workload = find_workload(WORKLOAD)
    for number in range(rounds):
        endpoint.salt = f"curve {share} {number}"
        num_same = round(share * num_programs)
        same = workload.draw(num_same, 5000 + number)
        own = [workload.draw(1, 10_000 + 1000 * number + each)[0] for each in range(num_programs - num_same)]
        mixed = [each for pair in zip(same, own, strict=False) for each in pair]
        mixed += same[len(own) :] + own[len(same) :]
        batch, alone = mixed[: -num_programs // 4], mixed[-num_programs // 4 :]
        begin = time.perf_counter()
        states = workload.program.run_batch(
            batch, endpoint=endpoint, sampling={"temperature": 0}, num_threads=concurrency, progress=False
        )
        seconds = time.perf_counter() - begin
        later = workload.program.run_batch(
            alone, endpoint=endpoint, sampling={"temperature": 0}, num_threads=1, progress=False
        )
        endpoint.take_calls()
        both = [*states, *later]
        yield Point(
            share,
            sum(state.usage.cached_tokens for state in both) / sum(state.usage.prompt_tokens for state in both),
            len(batch) / seconds,
            median(state.elapsed_s or 0.0 for state in states),
            median(state.elapsed_s or 0.0 for state in later),
        )


def lines(found: list[Point]) -> list[str]:
    rows = [
        f"| {each.share:.0%} | {each.hit_rate:.3f} | {each.programs_per_s:.2f} | {each.latency_s:.3f} "
        f"| {each.alone_s:.3f} |"
        for each in found
    ]
    head = "| share with the same examples | hit rate | programs/s | latency in the batch, s | latency alone, s |"
    return [head, "|---:|---:|---:|---:|---:|", *rows]


def draw(found: list[Point], path: Path) -> None:
    """Both curves, as SVG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rates = [each.hit_rate for each in found]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(rates, [each.programs_per_s for each in found], "o-", color="#3b6ea5")
    left.set_ylabel("programs/s")
    right.plot(rates, [each.latency_s for each in found], "o-", color="#3b6ea5", label="in the batch")
    right.plot(rates, [each.alone_s for each in found], "o-", color="#b5482a", label="alone")
    right.set_ylabel("latency, s")
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("hit rate")
        axes.set_ylim(bottom=0)
    figure.savefig(path)
