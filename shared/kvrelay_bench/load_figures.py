"""Figures of a load. Times are in seconds from the moment a request was due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvrelay_bench.answer_reader import Record
from kvrelay_bench.load_generator import LoadOutcome

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATE_SHARE = 0.05
"""A delay of the generator is reported if it exceeds this share of the figure that it is part of."""
LEAST_LATE_S = 0.002
BUSY_SHARE = 0.8
REPEATED_SHARE = 0.25
"""Of the prompt tokens. A chat template may be a common beginning of distinct prompts."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of a set of times; NaN if it is empty."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Quantiles interpolate linearly, like numpy."""
        found = np.fromiter(values, dtype=np.float64)
        if not found.size:
            found = np.full(1, np.nan)
        quantiles = {name: float(np.quantile(found, share)) for name, share in QUANTILES.items()}
        return cls(mean=float(found.mean()), max=float(found.max()), **quantiles)


@dataclass(frozen=True, slots=True)
class BenchSlo:
    """Bounds of a good request in seconds; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, record: Record) -> bool:
        """Returns whether a request is good. An answer of one token meets any bound of TPOT."""
        if record.error:
            return False
        measured = (record.ttft_s, record.tpot_s or 0.0, record.e2e_s)
        return all(
            bound is None or value <= bound
            for value, bound in zip(measured, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True)
        )

    @property
    def is_set(self) -> bool:
        """Returns whether at least one bound is set."""
        return any(bound is not None for bound in (self.ttft_s, self.tpot_s, self.e2e_s))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one load on one endpoint. Latencies and rates cover successful requests; rates are over the seconds
    from the first due request to the last end. `goodput`: requests per second that meet the SLO, and `good_share` their
    share of all; None without an SLO.

    `tokens_counted`: share of answers whose tokens the server counted; for others, pieces are counted. `cached_share`:
    share of the prompt tokens, None if the server does not say. `is_distinct`: no prompts have a common beginning.
    """

    num_requests: int
    num_failed: int
    seconds: float
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    requests_s: float
    prompt_tokens_s: float
    output_tokens_s: float
    goodput: float | None
    good_share: float | None
    tokens_counted: float
    cached_share: float | None
    lag_s: Spread
    stall_s: Spread
    cpu_share: float
    errors: dict[str, int]
    is_distinct: bool = False

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON types, with NaN as None."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @property
    def doubts(self) -> list[str]:
        """Reasons why the generator, or an earlier run, may have distorted the figures."""
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(f"the generator used {self.cpu_share:.0%} of a core: send less, or from several machines")
        if late := _late(self.lag_s, self.ttft_s):
            found.append(f"requests were sent {late} late, which TTFT and E2E include")
        if late := _late(self.stall_s, self.itl_s):
            found.append(f"the generator's time stamps were {late} late, which matters for ITL")
        if self.tokens_counted < 1:
            found.append(f"{1 - self.tokens_counted:.0%} of the answers had no token count: their pieces were counted")
        if self.is_distinct and (self.cached_share or 0) > REPEATED_SHARE:
            found.append(
                f"{self.cached_share:.0%} of the prompt tokens were cached, because an earlier run sent the same "
                "prompts: use another --seed for new ones"
            )
        return found


def _late(delay_s: Spread, figure_s: Spread) -> str:
    """The least quantile of a delay that matters for the same quantile of a figure, or ""."""
    # max(number, NaN) returns the number if it comes first. NaN means that no request succeeded.
    for name in ("p50", "p99"):
        late_s = getattr(delay_s, name)
        if late_s > max(LEAST_LATE_S, LATE_SHARE * getattr(figure_s, name)):
            return f"{1e3 * late_s:.1f} ms ({name})"
    return ""


def figures(outcome: LoadOutcome, slo: BenchSlo) -> LoadFigures:
    """Computes the figures of a finished load."""
    records = outcome.records
    good = [record for record in records if not record.error]
    seconds = max(record.ended_s for record in records) - min(record.intended_s for record in records)
    num_met = sum(map(slo.is_met, records))
    num_prompt = sum(record.num_prompt or 0 for record in good)
    cached = [record.num_cached for record in good if record.num_cached is not None]
    return LoadFigures(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        seconds=seconds,
        ttft_s=Spread.of(record.ttft_s for record in good),
        tpot_s=Spread.of(record.tpot_s for record in good if record.tpot_s is not None),
        itl_s=Spread.of(gap for record in good for gap in record.gaps_s),
        e2e_s=Spread.of(record.e2e_s for record in good),
        requests_s=len(good) / seconds,
        prompt_tokens_s=num_prompt / seconds,
        output_tokens_s=sum(record.num_tokens for record in good) / seconds,
        goodput=num_met / seconds if slo.is_set else None,
        good_share=num_met / len(records) if slo.is_set else None,
        tokens_counted=sum(record.num_output is not None for record in good) / max(1, len(good)),
        cached_share=sum(cached) / num_prompt if cached and num_prompt else None,
        lag_s=Spread.of(record.started_s - record.intended_s for record in records),
        stall_s=Spread.of(outcome.stalls_s),
        cpu_share=outcome.cpu_share,
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        is_distinct=outcome.is_distinct,
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of B's figure to A's over the rounds with both: median, least and most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """The ratio is NaN if A's figure is 0 or one is missing."""
        ratios = np.array([b / a if a else float("nan") for a, b in pairs])
        return cls(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
