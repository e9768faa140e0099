"""Loads, and the figures taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvrelay_bench.answer_reader import Record
from kvrelay_bench.load_figures import BenchSlo, figures
from kvrelay_bench.load_generator import LoadOutcome, LoadPoint
from kvrelay_bench.workload import Shape, arrival_times, synthetic

WARM_UP_SEED = 1 << 40
FIRST_LONG_S = 1.0
DECODE_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the tables. `scale` converts the stored value (seconds, per second) to the shown unit."""

    key: str
    title: str
    scale: float
    digits: int
    higher_is_better: bool


OUTPUT_RATE = Figure("output_tokens_s", "output tok/s", 1.0, 0, higher_is_better=True)
GAPS = (
    Figure("gap_p50", "gap p50, ms", 1e3, 1, higher_is_better=False),
    Figure("gap_p99", "gap p99, ms", 1e3, 1, higher_is_better=False),
)
FIGURES: dict[str, tuple[Figure, ...]] = {
    "throughput": (
        OUTPUT_RATE,
        Figure("ttft_p50", "TTFT p50, ms", 1e3, 0, higher_is_better=False),
        Figure("ttft_p99", "TTFT p99, ms", 1e3, 0, higher_is_better=False),
        *GAPS,
    ),
    "disaggregation": (
        *GAPS,
        Figure("gap_max", "worst gap, ms", 1e3, 0, higher_is_better=False),
        Figure("ttft_p50", "TTFT of long prompts p50, ms", 1e3, 0, higher_is_better=False),
        Figure("ttft_max", "TTFT of long prompts, worst, ms", 1e3, 0, higher_is_better=False),
        OUTPUT_RATE,
    ),
}
"""The shown figures by case."""


class PeerCase(Protocol):
    """A family of loads. Each load and round has its own prompts, equal for all servers."""

    @property
    def name(self) -> str:
        """A key of FIGURES."""
        ...

    @property
    def about(self) -> str:
        """The load in words, for the page."""
        ...

    def warm_up(self) -> LoadPoint: ...

    def loads(self, round_number: int) -> list[LoadPoint]: ...

    def values(self, point: LoadPoint, outcome: LoadOutcome) -> dict[str, float]:
        """Figures by key; may have NaN."""
        ...


@dataclass(frozen=True, slots=True)
class Throughput:
    """Prompts of one length: closed loops by concurrency, or open loops by rate. `num_requests`: per load."""

    num_prompt: int
    num_output: int
    concurrency: Sequence[int]
    rates: Sequence[float]
    num_requests: Sequence[int]
    seed: int = 0
    name: str = "throughput"

    @property
    def about(self) -> str:
        loop = "open loops with Poisson arrivals" if self.rates else "closed loops"
        counts = ", ".join(map(str, self.num_requests))
        return f"{self.num_prompt} prompt and {self.num_output} output tokens; {loop}; {counts} requests."

    def warm_up(self) -> LoadPoint:
        """As many requests at a time as the largest load, so that its shapes are compiled."""
        at_a_time = max(self.concurrency, default=4)
        shape = Shape(self.num_prompt, min(self.num_output, 16))
        return LoadPoint("warm-up", synthetic(shape, [0.0] * at_a_time, WARM_UP_SEED), at_a_time)

    def loads(self, round_number: int) -> list[LoadPoint]:
        shape = Shape(self.num_prompt, self.num_output)
        points = []
        for number, count in enumerate(self.num_requests):
            seed = (self.seed + round_number << 8) + number
            if self.rates:
                times = arrival_times(count, self.rates[number], "poisson", seed)
                points.append(LoadPoint(f"{self.rates[number]:g} requests/s", synthetic(shape, times, seed)))
            else:
                at_a_time = self.concurrency[number]
                points.append(LoadPoint(f"concurrency {at_a_time}", synthetic(shape, [0.0] * count, seed), at_a_time))
        return points

    def values(self, point: LoadPoint, outcome: LoadOutcome) -> dict[str, float]:
        found = figures(outcome, BenchSlo())
        answered = found.num_requests - found.num_failed
        return {
            "output_tokens_s": found.output_tokens_s,
            "requests_s": found.requests_s,
            "ttft_p50": found.ttft_s.p50,
            "ttft_p99": found.ttft_s.p99,
            "tpot_p50": found.tpot_s.p50,
            "gap_p50": found.itl_s.p50,
            "gap_p99": found.itl_s.p99,
            "e2e_p50": found.e2e_s.p50,
            "prompt_tokens": found.prompt_tokens_s * found.seconds / max(1, answered),
        }


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Long prompts that arrive at fixed intervals among running decodes. Each length is a load; 0 is the decodes alone.

    `gap`: between two pieces of a decode, from the first long prompt's arrival until the last one's first token.
    """

    num_decodes: int
    num_output: int
    long_lengths: Sequence[int]
    num_long: int
    interval_s: float
    seed: int = 0
    name: str = "disaggregation"

    @property
    def about(self) -> str:
        return (
            f"{self.num_decodes} requests of {DECODE_PROMPT_TOKENS} prompt and {self.num_output} output tokens start "
            f"at once. From {FIRST_LONG_S:g} s on a long prompt arrives every {self.interval_s:g} s, {self.num_long} "
            "in all. A gap is the time between two pieces of one of the running answers, from the first long prompt's "
            "arrival until the last one's first token."
        )

    def warm_up(self) -> LoadPoint:
        running = synthetic(Shape(DECODE_PROMPT_TOKENS, 16), [0.0] * self.num_decodes, WARM_UP_SEED)
        long = synthetic(Shape(max(self.long_lengths) or 1, 2), [0.0], WARM_UP_SEED + 1)
        return LoadPoint("warm-up", running + long)

    def loads(self, round_number: int) -> list[LoadPoint]:
        points = []
        for number, length in enumerate(self.long_lengths):
            seed = (self.seed + round_number << 8) + number
            asks = synthetic(Shape(DECODE_PROMPT_TOKENS, self.num_output), [0.0] * self.num_decodes, seed)
            if length:
                times = [FIRST_LONG_S + self.interval_s * each for each in range(self.num_long)]
                asks += synthetic(Shape(length, 2), times, seed + (1 << 32))
            points.append(LoadPoint(f"long prompts of {length} tokens" if length else "decodes alone", asks))
        return points

    def values(self, point: LoadPoint, outcome: LoadOutcome) -> dict[str, float]:
        running = [record for record in outcome.records[: self.num_decodes] if not record.error]
        long = [record for record in outcome.records[self.num_decodes :] if not record.error]
        first_s = min((record.intended_s for record in long), default=0.0)
        last_s = max((record.pieces_s[0] for record in long), default=float("inf"))
        gaps = np.array(_gaps(running, first_s, last_s) or [np.nan])
        ttft = np.array([record.ttft_s for record in long] or [np.nan])
        still_running = sum(record.ended_s >= last_s for record in running) if long else len(running)
        return {
            "gap_p50": float(np.quantile(gaps, 0.5)),
            "gap_p99": float(np.quantile(gaps, 0.99)),
            "gap_max": float(gaps.max()),
            "ttft_p50": float(np.quantile(ttft, 0.5)),
            "ttft_max": float(ttft.max()),
            "output_tokens_s": figures(outcome, BenchSlo()).output_tokens_s,
            "still_running": still_running / max(1, len(running)),
        }


def _gaps(records: Sequence[Record], first_s: float, last_s: float) -> list[float]:
    """Gaps that ended in this time."""
    return [
        after - before
        for record in records
        for before, after in zip(record.pieces_s, record.pieces_s[1:], strict=False)
        if first_s <= after <= last_s
    ]
