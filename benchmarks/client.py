"""A load of streamed completions over HTTP, timed token by token; by the client of `kvrelay bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvrelay_bench.http import Client, Endpoint
from kvrelay_bench.load_generator import LoadPoint
from kvrelay_bench.load_generator import run_load as bench_load
from kvrelay_bench.traces import read_trace, scaled
from kvrelay_bench.workload import Ask, Wire, traced

TIMEOUT_S = 600.0


@dataclass(slots=True)
class Request:
    """One request, and when its tokens came; seconds since the start of the load."""

    arrival_s: float
    prompt: NDArray[np.int32]
    num_output: int
    token_times_s: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    def fresh(self) -> Request:
        """The same request, not yet run."""
        return Request(self.arrival_s, self.prompt, self.num_output)


async def run_load(base_url: str, model: str, requests: list[Request], done: Callable[[int], None]) -> float:
    """Sends each request at its time; fills in what came. Returns the seconds until the last token.

    `done` is told how many have ended.
    """
    client = Client(Endpoint(base_url))
    wire = Wire(token_ids=(0, 1 << 31), extra={"return_token_ids": True})
    asks = [Ask(request.arrival_s, request.prompt.astype(np.int64), request.num_output) for request in requests]
    bodies = [client.request("POST", client.endpoint.path("completions"), wire.body(model, ask)) for ask in asks]
    try:
        outcome = await bench_load(client, LoadPoint("", asks), bodies, TIMEOUT_S, done)
        seconds = client.clock()
    finally:
        await client.close()
    for request, record in zip(requests, outcome.records, strict=True):
        for at_s, num_tokens in zip(record.pieces_s, record.piece_ids, strict=True):
            request.token_times_s += [at_s] * num_tokens
        request.failed = record.error
        if not request.failed and len(request.token_times_s) != request.num_output:
            request.failed = f"{len(request.token_times_s)} of {request.num_output} tokens came"
    return seconds


def synthetic_load(num_requests: int, rate: float, seed: int = 7) -> list[Request]:
    """Poisson arrivals; prompts log-normal (median 100 tokens, one in 20 of 1,500), half of them begin with one of 8
    shared prefixes of 96 tokens; outputs log-normal (median 30)."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(5, 2000, (8, 96))
    requests = []
    for arrival_s in np.cumsum(rng.exponential(1 / rate, num_requests)):
        length = 1500 if rng.random() < 0.05 else int(np.clip(rng.lognormal(np.log(100), 0.7), 8, 1200))
        tokens = rng.integers(5, 2000, length)
        if rng.random() < 0.5:
            tokens = np.concatenate([prefixes[rng.integers(8)], tokens])
        num_output = int(np.clip(rng.lognormal(np.log(30), 0.6), 2, 150))
        requests.append(Request(float(arrival_s), tokens.astype(np.int32), num_output))
    return requests


def traced_load(path: Path, num_requests: int, speed: float) -> list[Request]:
    """The first requests of a trace (see `kvrelay_bench.traces`), `speed` times as fast.

    Scaled to a small model: lengths are divided by 32, which keeps what the prompts share.
    """
    asks = traced(scaled(read_trace(path, num_requests), speed), 1 / 32, seed=7)
    return [Request(ask.arrival_s, (ask.prompt % 1995 + 5).astype(np.int32), ask.num_output) for ask in asks]


def long_prompt_load(long_tokens: int, num_decodes: int = 16, num_output: int = 200) -> list[Request]:
    """Some sequences that decode; half a second later a prompt of `long_tokens` tokens arrives among them."""
    rng = np.random.default_rng(8)
    requests = [Request(0.0, rng.integers(5, 2000, 32).astype(np.int32), num_output) for _ in range(num_decodes)]
    return [*requests, Request(0.5, rng.integers(5, 2000, long_tokens).astype(np.int32), 4)]
