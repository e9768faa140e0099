"""What a router process costs: CPU time a request and a token event, rates at saturation, latency added at half load.

One router as users run it, workers with nothing behind them (router_peer.py) and the load (router_load.py) are four
processes with Redis. Prompts are texts of 2,000 characters, tokenized by the router; a token is an event, unless the
router is behind and joins several.

- A request, an event: the router's own CPU time (all threads, from /proc) over runs of the same number of requests with
  few and with many tokens; the difference in events gives an event, the rest a request. Runs take turns.
- Saturation: as many clients as keep it busy, streams of 32 tokens; the rates, and how much of a core it had.
- Added latency: requests at half of that rate, at random times on reused connections, to prefill workers that answer at
  once: all of the time to the first event is the router's and the way's.

Usage: python -m benchmarks.router_cost [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from kvrelay.config.common import DEMO_MODEL_NAME
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import die_with_parent

FEW_TOKENS, MANY_TOKENS = 8, 136
START_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One load, as the client saw it and what it took of the router."""

    seen: dict[str, Any]
    cpu_s: float

    @property
    def cores(self) -> float:
        """That the router had on average."""
        return float(self.cpu_s / self.seen["seconds"])


class Router:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def cpu_s(self) -> float:
        """Of all its threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def load(self, *flags: str) -> Run:
        """Runs a load to its end."""
        before = self.cpu_s()
        command = [sys.executable, "-m", "benchmarks.router_load", "--port", str(self.port)]
        done = subprocess.run([*command, "--model", DEMO_MODEL_NAME, *flags], stdout=subprocess.PIPE, check=True)
        run = Run(json.loads(done.stdout), self.cpu_s() - before)
        if run.seen["failures"]:
            raise SystemExit(f"{run.seen['failures']} requests failed: {run.seen['failure']}")
        return run

    def wait_ready(self, workers: dict[str, int], timeout_s: float = START_WITHIN_S) -> None:
        """Until it knows all workers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/ready") as answer:
                    if json.load(answer)["workers"] == workers:
                        return
            except (URLError, ConnectionError):
                pass
            time.sleep(0.05)
        raise SystemExit("the router did not find its workers")


@contextmanager
def running(arguments: argparse.Namespace, checkout: Path | None = None) -> Iterator[Router]:
    """Redis, workers, and a router that knows them; workers and router of another `checkout`, if one is named."""
    with EmbeddedRedis() as redis:
        environ = {**os.environ, "KVRELAY_REDIS_URL": redis.url}
        peer = [sys.executable, "-m", "benchmarks.router_peer", "--model", DEMO_MODEL_NAME]
        peer += [f"--prefill={arguments.prefill}", f"--decode={arguments.decode}", f"--step-ms={arguments.step_ms}"]
        command = arguments.router or [sys.executable, "-m", "kvrelay_router"]
        command = [*command, f"--port={arguments.port}", "--max-queued-requests=4096", "--log-level=warning"]
        if checkout is not None:
            # Messages of one commit need not be those of another, so the workers come from the same checkout.
            environ["PYTHONPATH"] = python_path(checkout)
        workers = subprocess.Popen(peer, env=environ, cwd=checkout, preexec_fn=die_with_parent())
        process = subprocess.Popen(command, env=environ, cwd=checkout, preexec_fn=die_with_parent())
        try:
            router = Router(process, arguments.port)
            router.wait_ready({"prefill": arguments.prefill, "decode": arguments.decode})
            yield router
        finally:
            for each in (process, workers):
                each.send_signal(signal.SIGTERM)
                each.wait()


def python_path(checkout: Path) -> str:
    """The folders that a process of another checkout imports from."""
    folders = (checkout, checkout / "shared", *(checkout / "services").iterdir())
    return os.pathsep.join(map(str, folders))


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time in microseconds, of one pair of runs."""

    request_us: float
    event_us: float


def measure_cost(router: Router, arguments: argparse.Namespace, *flags: str) -> Cost:
    """A run with few tokens and one with many, of the same number of requests."""
    common = ("--requests", str(arguments.requests), "--concurrency", str(arguments.concurrency), *flags)
    few = router.load("--tokens", str(FEW_TOKENS), *common)
    many = router.load("--tokens", str(MANY_TOKENS), *common)
    event_s = (many.cpu_s - few.cpu_s) / (many.seen["events"] - few.seen["events"])
    request_s = (few.cpu_s - event_s * few.seen["events"]) / few.seen["requests"]
    return Cost(request_s * 1e6, event_s * 1e6)


def spread(values: list[float], digits: int = 0) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def measure(arguments: argparse.Namespace) -> list[str]:
    """All of it, as lines of Markdown."""
    with running(arguments) as router:
        router.load("--requests", "300", "--tokens", "32")  # warm
        kinds = {"completion": (), "chat": ("--chat",)}
        costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
        full: list[Run] = []
        half: list[Run] = []
        for _ in range(arguments.repeats):
            for kind, flags in kinds.items():
                costs[kind].append(measure_cost(router, arguments, *flags))
            full.append(
                router.load("--concurrency", str(arguments.saturating), "--requests", str(2 * arguments.requests))
            )
            rate = full[-1].seen["requests"] / full[-1].seen["seconds"] / 2
            half.append(router.load("--rate", str(rate), "--requests", str(arguments.requests)))
            print(costs["completion"][-1], costs["chat"][-1], full[-1], half[-1], file=sys.stderr, flush=True)
    rows = ["| | CPU us a request | CPU us an event |", "|---|---|---|"]
    for kind, each in costs.items():
        requests, events = [cost.request_us for cost in each], [cost.event_us for cost in each]
        rows.append(f"| {kind} | {spread(requests)} | {spread(events, 1)} |")
    rows += ["", "| at | requests/s | tokens/s | events/s | router's cores | first event p50 ms | p99 ms |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for name, runs in (("saturation", full), ("half of it", half)):
        columns = [spread([run.seen["requests"] / run.seen["seconds"] for run in runs])]
        columns += [spread([run.seen["tokens"] / run.seen["seconds"] for run in runs])]
        columns += [spread([run.seen["events"] / run.seen["seconds"] for run in runs])]
        columns += [spread([run.cores for run in runs], 2)]
        columns += [spread([run.seen["first_p50_ms"] for run in runs], 2)]
        columns += [spread([run.seen["first_p99_ms"] for run in runs], 1)]
        rows.append(f"| {name} | {' | '.join(columns)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--saturating", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=18473)
    parser.add_argument("--router", nargs="*", default=[], help="another command for the router, to profile it")
    arguments = parser.parse_args()
    print("\n".join(measure(arguments)))


if __name__ == "__main__":
    main()
