"""A load of streamed completions over HTTP, timed token by token; light, because it shares the servers' cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

_UNIT = 16  # prompt tokens that stand for one of a trace's hash ids
_TRACE_UNIT = 512  # those it stands for in the trace


@dataclass(slots=True)
class Request:
    """One request, and when its tokens came; seconds since the start of the load."""

    arrival_s: float
    prompt: NDArray[np.int32]
    num_output: int
    token_times_s: list[float] = field(default_factory=list)
    num_cached: int = 0
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
    host, port = base_url.removeprefix("http://").split(":")
    started = time.perf_counter()
    ended = 0

    async def one(request: Request) -> None:
        nonlocal ended
        await asyncio.sleep(started + request.arrival_s - time.perf_counter())
        await _complete(host, int(port), model, request, started)
        ended += 1
        done(ended)

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(one(request))
    return time.perf_counter() - started


async def _complete(host: str, port: int, model: str, request: Request, started: float) -> None:
    body = {
        "model": model,
        "prompt": request.prompt.tolist(),
        "max_tokens": request.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    try:
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        async for line in reader:  # an event is a line; the lines between them are HTTP's
            if line.startswith(b"data: {"):
                _take(request, orjson.loads(line[6:]), time.perf_counter() - started)
    finally:
        writer.close()
    if len(request.token_times_s) != request.num_output:
        request.failed = request.failed or f"{len(request.token_times_s)} of {request.num_output} tokens came"


def _take(request: Request, event: dict[str, object], at_s: float) -> None:
    if "error" in event:
        request.failed = str(event["error"])
        return
    choices = event.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            request.token_times_s += [at_s] * len(choice.get("token_ids") or ())
    usage = event.get("usage")
    if isinstance(usage, dict):
        request.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


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
    """The first requests of a trace in Mooncake's format (a JSON object a line: `timestamp` in ms, `input_length`,
    `output_length`, `hash_ids`), `speed` times as fast.

    Scaled to a small model: each hash id becomes 16 fixed tokens instead of 512, lengths are divided by 32, which
    keeps what the prompts share.
    """
    requests = []
    with path.open(encoding="utf-8") as lines:
        for _, line in zip(range(num_requests), lines, strict=False):
            entry = json.loads(line)
            parts = [np.random.default_rng(each).integers(5, 2000, _UNIT) for each in entry["hash_ids"]]
            length = max(1, int(entry["input_length"]) * _UNIT // _TRACE_UNIT)
            tokens = np.concatenate(parts)[:length].astype(np.int32)
            num_output = max(1, int(entry["output_length"]) * _UNIT // _TRACE_UNIT)
            requests.append(Request(entry["timestamp"] / 1e3 / speed, tokens, num_output))
    return requests


def long_prompt_load(long_tokens: int, num_decodes: int = 16, num_output: int = 200) -> list[Request]:
    """Some sequences that decode; half a second later a prompt of `long_tokens` tokens arrives among them."""
    rng = np.random.default_rng(8)
    requests = [Request(0.0, rng.integers(5, 2000, 32).astype(np.int32), num_output) for _ in range(num_decodes)]
    return [*requests, Request(0.5, rng.integers(5, 2000, long_tokens).astype(np.int32), 4)]
