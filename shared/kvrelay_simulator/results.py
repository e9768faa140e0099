"""Figures of a run: times, goodput, hit rate and its best possible value, utilisation; and their plot, which needs
matplotlib (the extra `bench`), imported on use.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay_bench.traces import Tokens
from kvrelay_simulator.fleet import SimulatedFleet
from kvrelay_simulator.workers import FINGERPRINT, Request


@dataclass(frozen=True, slots=True)
class RunSlo:
    """Bounds of a good request: seconds to the first token and mean seconds per output token."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return " and ".join(f"{name} <= {bound:g} s" for name, bound in bounds if isfinite(bound))


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """TTFT of each request, and TPOT of requests with several tokens, in seconds."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Times:
        """Times of finished requests."""
        return cls(
            np.array([_since_arrival(request) for request in requests]),
            np.array([_tpot(request) for request in requests if request.num_output > 1]),
        )


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one run. Rates are per virtual second from first arrival to last token."""

    num_requests: int
    seconds: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    goodput: float  # requests per second that meet the SLO
    good_share: float
    prompt_tokens_s: float
    output_tokens_s: float
    hit_rate: float
    best_hit_rate: float
    prefill_utilisation: float
    decode_utilisation: float
    preemptions: int

    @property
    def can_hit(self) -> bool:
        """Returns whether the trace has prompts that begin alike, so that a cache could hit."""
        return self.best_hit_rate > 0

    @property
    def hit_share(self) -> float:
        """Hit rate divided by the best possible one; 1 if no hits are possible."""
        return self.hit_rate / self.best_hit_rate if self.best_hit_rate else 1.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_share": self.hit_share if self.can_hit else None}


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One run with its name in tables."""

    name: str
    num_prefill: int
    figures: RunFigures
    times: Times


def figures(fleet: SimulatedFleet, requests: Sequence[Request], slo: RunSlo, best_hit_rate: float) -> RunFigures:
    """Computes the figures of a finished run."""
    times = Times.of(requests)
    ttft, spoken = times.ttft_s, times.tpot_s if len(times.tpot_s) else np.zeros(1)
    seconds = max(request.finished_s or 0.0 for request in requests) - requests[0].arrival_s
    good = sum(_since_arrival(request) <= slo.ttft_s and _tpot(request) <= slo.tpot_s for request in requests)
    num_prompt = sum(len(request.tokens) for request in requests)
    return RunFigures(
        num_requests=len(requests),
        seconds=seconds,
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        tpot_p50_s=float(np.percentile(spoken, 50)),
        tpot_p90_s=float(np.percentile(spoken, 90)),
        tpot_p99_s=float(np.percentile(spoken, 99)),
        goodput=good / seconds,
        good_share=good / len(requests),
        prompt_tokens_s=num_prompt / seconds,
        output_tokens_s=sum(request.num_output for request in requests) / seconds,
        hit_rate=sum(request.num_cached_tokens for request in requests) / num_prompt,
        best_hit_rate=best_hit_rate,
        prefill_utilisation=_utilisation([worker.busy_s for worker in fleet.prefill], seconds),
        decode_utilisation=_utilisation([worker.busy_s for worker in fleet.decode], seconds),
        preemptions=sum(worker.scheduler.num_preemptions for worker in fleet.workers.values()),
    )


def best_possible_hit_rate(prompts: Iterable[Tokens], block_size: int, num_blocks: int | None = None) -> float:
    """Hit rate of one LRU cache of `num_blocks` blocks (None: unlimited) for the fleet, which evicts chains from their
    end and has each prompt from its arrival. At least one token of each prompt is computed. Outputs are not cached, so
    the next turn of a conversation may do better."""
    cache: OrderedDict[BlockHash, None] = OrderedDict()
    root = root_hash(model=FINGERPRINT)
    num_hits = num_tokens = 0
    for tokens in prompts:
        hashes = hash_blocks(root, tokens, block_size)
        num_tokens += len(tokens)
        num_reusable = (len(tokens) - 1) // block_size
        num_held = next((i for i, each in enumerate(hashes) if each not in cache), len(hashes))
        num_hits += min(num_held, num_reusable) * block_size
        for each in reversed(hashes):
            cache[each] = None
            cache.move_to_end(each)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hits / num_tokens


def _since_arrival(request: Request) -> float:
    assert request.first_token_s is not None
    return request.first_token_s - request.arrival_s


def _tpot(request: Request) -> float:
    assert request.first_token_s is not None and request.finished_s is not None
    return (request.finished_s - request.first_token_s) / max(1, request.num_output - 1)


def _utilisation(busy_s: Sequence[float], seconds: float) -> float:
    return sum(busy_s) / (len(busy_s) * seconds) if busy_s else 0.0


SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Checks before a long run. Raises ValueError if matplotlib is missing, or for an unsupported file type."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: must end in .svg, .png or .pdf")


def draw_runs(runs: Sequence[RunResult], slo: RunSlo, path: Path, title: str) -> None:
    """Draws latencies with the SLO, goodput, hit rates and utilisation of each run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16.8, 3.6), layout="constrained")
    figure.suptitle(title)
    for run in runs:
        for axis, values_s in ((axes[0], run.times.ttft_s), (axes[1], run.times.tpot_s)):
            shares = np.arange(1, len(values_s) + 1) / max(1, len(values_s))
            axis.step(1e3 * np.sort(values_s), shares, where="post", label=run.name)
    for axis, name, bound_s in ((axes[0], "TTFT", slo.ttft_s), (axes[1], "TPOT", slo.tpot_s)):
        axis.set(xlabel=f"{name}, ms", ylabel="share of requests", ylim=(0, 1))
        axis.grid(alpha=0.3)
        if isfinite(bound_s):
            axis.axvline(1e3 * bound_s, color="black", linestyle=":", label="SLO")
    axes[0].set_xscale("log")
    _legend_below(axes[0])
    _bars(axes[2], runs, "requests/s that keep the SLO", {"goodput": lambda f: f.goodput})
    shares_of: dict[str, Callable[[RunFigures], float]] = {
        "hit rate": lambda f: f.hit_rate,
        "of the best": lambda f: f.hit_share if f.can_hit else 0.0,
        "prefill busy": lambda f: f.prefill_utilisation,
        "decode busy": lambda f: f.decode_utilisation,
    }
    _bars(axes[3], runs, "share", shares_of)
    _legend_below(axes[3])
    figure.savefig(path)
    pyplot.close(figure)


def _legend_below(axis: Any) -> None:
    """Puts the legend under the panel, so that it hides no curve."""
    axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _bars(
    axis: Any, runs: Sequence[RunResult], title: str, values: Mapping[str, Callable[[RunFigures], float]]
) -> None:
    """Draws one group of bars per run."""
    height = 0.8 / len(values)
    for number, (name, value) in enumerate(values.items()):
        places = [place + number * height for place in range(len(runs))]
        axis.barh(places, [value(run.figures) for run in runs], height, label=name)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(runs))], [run.name for run in runs])
    axis.invert_yaxis()
    axis.set_xlabel(title)
