"""Figures of a run: times, goodput, hit rate and its best possible value, utilisation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
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
