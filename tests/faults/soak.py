"""Mixed load for an hour, or as long as asked: memory, descriptors, threads and blocks must stay flat.

Run: make test-soak ARGS="--seconds 600", or .venv/bin/python -m tests.faults.soak --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.faults.storm.processes import Holding
from tests.faults.test_redis_under_streams import MAX_TOKENS, PARAMETERS, PROFILE, expected, streamed

NUM_CLIENTS = 16
WARM_UP_SHARE = 0.25
"""Of the run, which slopes leave out."""
SAMPLE_EVERY_S = 5.0
GROWTH_MB = 16.0
GROWTH_SHARE = 0.05
"""Of resident memory, from the middle third of the samples to the last. Bounded histories fill slowly."""
MORE_DESCRIPTORS = 8
MORE_THREADS = 4
KINDS = ("stream", "whole", "leave", "samples", "bad", "score")

Samples = Mapping[str, Sequence[Holding]]


@dataclass(slots=True)
class Soaked:
    """What a run did. `samples` are by process; `growth` says which of them did not stay flat."""

    took_s: float
    requests: Counter[str]
    samples: dict[str, list[Holding]]
    growth: list[str] = field(default_factory=list)

    def slope(self, name: str, quantity: str) -> float:
        """Per hour, by least squares over what follows the warm-up; 0 with fewer than three samples."""
        held = self.samples[name]
        kept = [getattr(each, quantity) for each in held[int(len(held) * WARM_UP_SHARE) :]]
        if len(kept) < 3:
            return 0.0
        hours_a_sample = self.took_s / 3600.0 / len(held)
        return statistics.linear_regression(range(len(kept)), kept).slope / hours_a_sample


def growth_of(samples: Samples) -> list[str]:
    """Returns a line for each quantity of a process that grew from the middle third of its samples to the last."""
    lines = []
    for name, held in samples.items():
        third = len(held) // 3
        if not third:
            continue
        middle, last = held[third : 2 * third], held[-third:]
        for quantity, allowed in (
            ("resident_mb", lambda before: GROWTH_MB + GROWTH_SHARE * before),
            ("descriptors", lambda before: MORE_DESCRIPTORS),
            ("threads", lambda before: MORE_THREADS),
        ):
            before = statistics.median(getattr(each, quantity) for each in middle)
            after = statistics.median(getattr(each, quantity) for each in last)
            if after - before > allowed(before):
                lines.append(f"{name}: {quantity} grew from {before:g} to {after:g}")
    return lines


async def soak(stack: Stack, seconds: float, num_clients: int = NUM_CLIENTS, log: Path | None = None) -> Soaked:
    """Writes each sample to `log` as a line of JSON. Raises AssertionError for a wrong token or an error that no
    request asked for."""
    run = _Soak(stack, seconds, num_clients, log)
    return await run.run()


class _Soak:
    """Clients, and a watch over the processes."""

    def __init__(self, stack: Stack, seconds: float, num_clients: int, log: Path | None) -> None:
        self._stack = stack
        self._num_clients = num_clients
        self._log = log
        self._began = time.monotonic()
        self._ends_at = self._began + seconds
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, list[Holding]] = defaultdict(list)

    async def run(self) -> Soaked:
        async with httpx.AsyncClient(base_url=self._stack.base_url, timeout=300) as http, asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(http))
            clients = [group.create_task(self._client(http, number)) for number in range(self._num_clients)]
            await asyncio.wait(clients)
            watch.cancel()
        samples = dict(self._samples)
        return Soaked(time.monotonic() - self._began, self._counts, samples, growth_of(samples))

    async def _watch(self, http: httpx.AsyncClient) -> None:
        supervisor = psutil.Process(self._stack.process.pid)
        while True:
            line: dict[str, Any] = {"at_s": round(time.monotonic() - self._began, 1)}
            for process in (supervisor, *supervisor.children(recursive=True)):
                try:
                    name = "supervisor" if process is supervisor else _name_of(process)
                    held = Holding.of(process.pid)
                except (psutil.NoSuchProcess, FileNotFoundError):
                    continue
                self._samples[name].append(held)
                line[name] = asdict(held)
            if self._log is not None:
                workers = (await http.get("/fleet")).json()["workers"]
                line["blocks"] = {worker["worker_id"]: worker["blocks"] for worker in workers}
                with self._log.open("a") as log:
                    log.write(json.dumps(line | {"requests": self._counts.total()}) + "\n")
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._ends_at:
            family = random.Random(rng.randrange(40)).choices(range(3, 2048), k=320)
            prompt = family[: rng.choice([0, 64, 320])] + rng.choices(range(3, 2048), k=rng.randint(1, 300))
            kind = rng.choice(KINDS)
            await self._ask(http, kind, prompt, rng)
            self._counts[kind] += 1

    async def _ask(self, http: httpx.AsyncClient, kind: str, prompt: list[int], rng: random.Random) -> None:
        body: dict[str, Any] = {"model": self._stack.model, "prompt": prompt, "return_token_ids": True} | PARAMETERS
        match kind:
            case "stream":
                assert await streamed(http, self._stack.model, prompt) == expected(prompt)
            case "whole":
                assert await _whole(http, body) == [expected(prompt)]
            case "samples":
                answers = await _whole(http, body | {"n": 3, "temperature": 1.0, "seed": rng.getrandbits(32)})
                assert [len(each) for each in answers] == [MAX_TOKENS] * 3
            case "score":
                answer = await http.post("/v1/completions", json=body | {"max_tokens": 1, "logprobs": 3, "echo": True})
                assert answer.status_code == 200, answer.text
            case "bad":
                answer = await http.post("/v1/completions", json=body | {"temperature": -1})
                assert answer.status_code == 400, answer.text
            case "leave":
                async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as started:
                    async for _ in started.aiter_lines():
                        if rng.random() < 0.1:
                            break


async def _whole(http: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def _name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    for word in words:
        if word.startswith("--worker-id="):
            return str(word.partition("=")[2])
    return "router" if "kvrelay_router" in words else Path(words[0]).name


def run_soak(directory: Path, seconds: float, num_clients: int = NUM_CLIENTS, log: Path | None = None) -> Soaked:
    """A whole system with simulated devices. Nothing is held at its end."""
    profile = directory / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    fleet = ("--prefill", "2", "--decode", "2", "--backend", "simulated", "--profile", str(profile))
    with Stack(DEMO_MODEL, directory / "state", *fleet) as stack:
        soaked = asyncio.run(soak(stack, seconds, num_clients, log))
        requests = stack.fleet()["requests"]
        assert not requests["failed"] and not requests["timed_out"] and not requests["protocol_errors"], requests
        stack.wait_until_clean()
        for worker in stack.fleet()["workers"]:
            blocks = worker["blocks"]
            assert blocks["free"] + blocks["cached"] == blocks["total"], worker
    return soaked


def print_report(soaked: Soaked) -> None:
    """A line for each process: the medians of the first, middle and last third, and slopes after the warm-up."""
    print(f"{soaked.took_s:.0f} s, {soaked.requests.total()} requests: {dict(soaked.requests)}")
    for name, held in soaked.samples.items():
        third = max(1, len(held) // 3)
        parts = [held[:third], held[third : 2 * third] or held, held[-third:]]
        figures = [
            f"{statistics.median(each.resident_mb for each in part):.0f} MB, "
            f"{statistics.median(each.descriptors for each in part):g} descriptors"
            for part in parts
        ]
        slopes = ", ".join(
            f"{soaked.slope(name, quantity):+.2f} {unit}"
            for quantity, unit in (("resident_mb", "MB"), ("descriptors", "descriptors"), ("threads", "threads"))
        )
        print(f"{name:14} {' > '.join(figures)}; an hour: {slopes}")
    for line in soaked.growth:
        print(f"GREW {line}")


def main() -> int:
    """Returns 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long the load lasts (default: an hour)")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="how many ask at once (default: %(default)s)")
    parser.add_argument("--log", type=Path, help="write each sample here as a line of JSON, with the workers' blocks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvrelay-soak-") as directory:
        soaked = run_soak(Path(directory), options.seconds, options.clients, options.log)
    print_report(soaked)
    return 1 if soaked.growth else 0


if __name__ == "__main__":
    sys.exit(main())
