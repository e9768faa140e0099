"""What telemetry costs: CPU seconds of all services per thousand tokens, with everything on and with everything off.

Two systems as users run them (`kvrelay up`, one prefill and one decode worker, the demo model) stand side by side and
take turns: a run on one, the same run on the other, the order changing from pair to pair. One exports every trace and,
every ten seconds, all metrics to a collector, has its pages scraped as often, and logs JSON; the other has none of it.
CPU time is that of router and workers, all their threads, from /proc; the collector's and the client's do not count.

Streams of `--tokens` tokens after prompts that share nothing, each handed over from prefill to decode, `--concurrency`
at a time. A pair gives a ratio; the median of the ratios and their quartiles are what counts, for other load on the
machine disturbs single runs by more than is measured here. So the second table adds the parts up, each measured by
itself, by a process's CPU time, with its encoding, its sending and the threads that do so.

Usage: python -m benchmarks.telemetry [--pairs 12] [--write benchmarks/results/telemetry.md]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

import httpx

from kvrelay.ports import HeldPort
from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.instruments import SECONDS, Histogram
from kvrelay.telemetry.metric_samples import MetricSample, MetricSamples
from kvrelay.telemetry.otlp import open_export
from kvrelay.telemetry.prometheus import metrics_page
from kvrelay.telemetry.trace_context import new_trace
from kvrelay_router.openai.request_metrics import RequestMetrics
from tests.fakes.collector import Collector
from tests.fakes.stack import Stack

PROMPT_TOKENS = 160
SCRAPE_INTERVAL_S = 10.0
SERVICES = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Run:
    """CPU seconds by service, and the tokens that they bought, prompts' and outputs'."""

    cpu_s: dict[str, float]
    num_tokens: int

    def per_thousand_ms(self, *services: str) -> float:
        """CPU milliseconds per thousand tokens."""
        return sum(self.cpu_s[service] for service in services) * 1e6 / self.num_tokens


class System:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._pids = {name.partition("-")[0]: pid for name, pid in stack.children().items()}

    def cpu_s(self) -> dict[str, float]:
        """Of each service so far, all threads."""
        found = {}
        for service, pid in self._pids.items():
            tasks = Path(f"/proc/{pid}/task").iterdir()
            found[service] = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        return found

    def run(self, arguments: argparse.Namespace, seed: int) -> Run:
        """One load to its end."""
        before = self.cpu_s()
        num_tokens = asyncio.run(load(self.stack, arguments, seed))
        after = self.cpu_s()
        return Run({service: after[service] - before[service] for service in SERVICES}, num_tokens)


async def load(stack: Stack, arguments: argparse.Namespace, seed: int) -> int:
    """Streams of fresh prompts; returns the tokens of prompts and outputs."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(arguments.concurrency)
    limits = httpx.Limits(max_connections=arguments.concurrency)
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> None:
            body = {"model": stack.model, "prompt": prompt, "max_tokens": arguments.tokens, "ignore_eos": True}
            async with places, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_raw():
                    pass

        prompts = [rng.choices(range(10, 500), k=PROMPT_TOKENS) for _ in range(arguments.requests)]
        await asyncio.gather(*map(one, prompts))
    return int(arguments.requests * (PROMPT_TOKENS + arguments.tokens))


@contextmanager
def scraped(ports: list[int]) -> Iterator[None]:
    """As Prometheus would, only more often."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_INTERVAL_S):
            for port in ports:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                    page.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


SINK = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Sink(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def part_costs() -> dict[str, float]:
    """CPU microseconds of each part, all told."""
    sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    assert sink.stdout is not None
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.stdout.readline().strip()}"}
    try:
        with patch.dict(os.environ, environ):
            return {"a span": span_cost_us(), **metrics_costs_us(), "a request's metrics": request_cost_us()}
    finally:
        sink.kill()
        sink.wait()


def span_cost_us(num_spans: int = 20_000) -> float:
    """Recorded, put into a batch, encoded, sent."""
    export = open_export("router", "benchmark")
    tracer = export.tracer
    assert tracer is not None
    parent = new_trace(is_sampled=True)
    attributes = {f"kvrelay.attribute.{number}": number for number in range(8)}
    started = time.process_time()
    for number in range(num_spans):
        tracer.record("kvrelay.attempt", parent.child(), parent, 1.0, 2.0, attributes=attributes)
        if number % 256 == 255:
            time.sleep(0.02)  # the queue is bounded
    asyncio.run(export.close())
    return (time.process_time() - started) / num_spans * 1e6


def metrics_costs_us(num: int = 50) -> dict[str, float]:
    """All metrics of the catalogue, four samples each: a page, and one export."""
    histogram = Histogram("s", SECONDS)
    samples: MetricSamples = {
        name: [MetricSample((), histogram.report())]
        if metric.kind == "histogram"
        else [MetricSample((("attribute", str(i)),), i) for i in range(4)]
        for name, metric in METRICS.items()
    }
    export = open_export("router", "benchmark")
    push = export._metrics
    assert push is not None
    push._read = lambda: samples
    costs = {}
    for name, call in (("a page", lambda: metrics_page(samples)), ("an export of metrics", lambda: push._push()())):
        started = time.process_time()
        for _ in range(num):
            call()
        costs[name] = (time.process_time() - started) / num * 1e6
    asyncio.run(export.close())
    return costs


def request_cost_us(num: int = 20_000) -> float:
    """What the HTTP layer notes of a request, without its span."""
    metrics = RequestMetrics("model")
    started = time.process_time()
    for _ in range(num):
        timings = metrics.begin("/v1/completions", "")
        timings.got_tokens()
        metrics.ended(timings, "request")
    return (time.process_time() - started) / num * 1e6


def spread(values: list[float], digits: int = 2) -> str:
    """`median (first to third quartile)`."""
    first, _, third = quantiles(values, n=4)
    return f"{median(values):.{digits}f} ({first:.{digits}f} to {third:.{digits}f})"


def measure(arguments: argparse.Namespace) -> list[str]:
    """All of it, as lines of Markdown."""
    with tempfile.TemporaryDirectory() as directory, Collector() as collector:
        held = HeldPort()
        ports = [held.port, held.port + 1, held.port + 2]
        held.release()
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "10000"}
        flags = ("--threads", "1")
        with patch.dict(os.environ, environ):
            on = Stack(None, Path(directory) / "on", *flags, f"--metrics-port={ports[0]}", "--log-format=json")
        with on, Stack(None, Path(directory) / "off", *flags) as off, scraped(ports):
            systems = {"on": System(on), "off": System(off)}
            for name, system in systems.items():
                system.run(arguments, seed=len(name))  # warm
            pairs = []
            for number in range(arguments.pairs):
                order = ("on", "off") if number % 2 else ("off", "on")
                runs = {name: systems[name].run(arguments, seed=1000 + number) for name in order}
                pairs.append((runs["on"], runs["off"]))
                ratio = runs["on"].per_thousand_ms(*SERVICES) / runs["off"].per_thousand_ms(*SERVICES)
                print(f"pair {number}: {ratio:.4f}", runs, file=sys.stderr, flush=True)
            num_spans = len(collector.collected.spans)
    rows = ["| | CPU ms per 1,000 tokens, off | on | on / off |", "|---|---|---|---|"]
    for title, services in (("all services", SERVICES), *((service, (service,)) for service in SERVICES)):
        with_it = [each.per_thousand_ms(*services) for each, _ in pairs]
        without = [each.per_thousand_ms(*services) for _, each in pairs]
        ratios = [a / b for a, b in zip(with_it, without, strict=True)]
        rows.append(f"| {title} | {spread(without, 1)} | {spread(with_it, 1)} | {spread(ratios, 4)} |")
    num_requests = (arguments.pairs + 1) * arguments.requests
    rows += ["", f"{arguments.pairs} pairs of runs of {arguments.requests} requests with {PROMPT_TOKENS} prompt and "]
    rows[-1] += f"{arguments.tokens} output tokens, {arguments.concurrency} at a time. The collector got "
    rows[-1] += f"{num_spans / num_requests:.1f} spans a request, those of steps included. Medians, and quartiles."
    return rows + part_rows(part_costs(), num_spans / num_requests, arguments.tokens, median_off(pairs))


def median_off(pairs: list[tuple[Run, Run]]) -> float:
    """CPU milliseconds per thousand tokens without telemetry."""
    return median(off.per_thousand_ms(*SERVICES) for _, off in pairs)


def part_rows(costs: dict[str, float], spans_each: float, num_output: int, off_ms: float) -> list[str]:
    """What the parts are of all."""
    rows = ["", "| Part | CPU us |", "|---|---|"]
    rows += [f"| {name} | {cost:,.1f} |" for name, cost in costs.items()]
    request_us = spans_each * costs["a span"] + costs["a request's metrics"]
    per_thousand_ms = request_us / (PROMPT_TOKENS + num_output)
    per_second = len(SERVICES) * (costs["a page"] + costs["an export of metrics"]) / 10 / 1e6
    rows += [
        "",
        f"A request with {spans_each:.1f} spans: {request_us:,.0f} us, {per_thousand_ms:.2f} ms per 1,000 tokens, ",
    ]
    rows[-1] += (
        f"which is {100 * per_thousand_ms / off_ms:.2f} % of what they cost without. Pages and exports of three "
    )
    rows[-1] += f"services every ten seconds: {100 * per_second:.2f} % of a core, whatever the load."
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    print("\n".join(rows))
    if arguments.write is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        text = "\n".join(rows)
        arguments.write.write_text(f"# What telemetry costs\n\n{machine}; see `benchmarks/telemetry.py`.\n\n{text}\n")


if __name__ == "__main__":
    main()
