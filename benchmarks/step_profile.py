"""Where a decoding step's time goes on a real worker behind a real router, by stage and by thread.

A router, one decode worker that also computes the prompts (`step_stages`), and Redis, as `kvrelay up` starts them; then
one load of streams for each batch size. Counted are steps in which all streams decode.

- Stages: CPU time of their thread, without the stages inside of them; the median over steps.
- Period: from the begin of one forward to that of the next one; gap: from the end of one to the begin of the next one.
  Both by the wall's clock, so they are only true on an idle machine; the least and the median over steps.
- Threads: CPU time of all threads of worker and router over the steps, which also has what lies between the stages.
- Not the forward: the share of the step loop's two threads that is not the model's layers and head.

Usage: python -m benchmarks.step_profile --model DIR [--batches 1 8 32] [--tokens 400] [--threads 1]
    [--dtype bfloat16] [--flag=--overlap=on] [--temperature 0] [--write benchmarks/results/step_profile.md]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.router_cost import Router
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.ports import HeldPort
from kvrelay.process import die_with_parent
from kvrelay_bench.http import Client, Endpoint
from kvrelay_bench.load_generator import LoadOutcome, LoadPoint, run_load
from kvrelay_bench.workload import Ask, Wire

PROMPT_TOKENS = 64
TIMEOUT_S = 600.0
START_WITHIN_S = 300.0  # a worker loads and checks a model, perhaps beside other load
FORWARD = ("forward: layers", "forward: head")


@dataclass(frozen=True, slots=True)
class Steps:
    """The recorded steps of one batch size."""

    num_rows: int
    lines: list[dict[str, Any]]

    def stage_us(self) -> dict[str, float]:
        """The median of each stage, in microseconds."""
        names = dict.fromkeys(name for line in self.lines for name in line["stages"])
        return {name: median(line["stages"].get(name, 0) for line in self.lines) / 1e3 for name in names}

    def wall_us(self, name: str) -> tuple[float, float]:
        """The least and the median of `gap` or `period`."""
        values = [line[name] / 1e3 for line in self.lines]
        return min(values), median(values)

    def thread_us(self) -> dict[str, float]:
        """CPU time per step of each thread that had any, by process and thread."""
        sampled = [(at, line["threads"]) for at, line in enumerate(self.lines) if "threads" in line]
        (first_at, first), (last_at, last) = sampled[0], sampled[-1]
        found: dict[str, float] = {}
        for process, threads in last.items():
            for name, taken in threads.items():
                us = (taken - first[process].get(name, 0)) / 1e3 / (last_at - first_at)
                label = f"{process}: {name.split(' ', 1)[1]}"
                found[label] = found.get(label, 0.0) + us
        return {name: us for name, us in sorted(found.items(), key=lambda item: -item[1]) if us >= 1}

    @property
    def share_beside(self) -> float:
        """Of the CPU time of the stages, those that are not the forward."""
        stages = self.stage_us()
        return 1 - sum(stages.get(name, 0.0) for name in FORWARD) / sum(stages.values())


@contextmanager
def serving(arguments: argparse.Namespace, record: Path) -> Iterator[int]:
    """Redis, the router and the worker, which writes its steps to `record`. Yields the port."""
    with EmbeddedRedis() as redis, HeldPort("127.0.0.1", 0) as held:
        environ = {**os.environ, "KVRELAY_REDIS_URL": redis.url, "KVRELAY_LOG_LEVEL": "warning"}
        # As `worker_main` sets it, which is too late here: the recorder imports torch.
        environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(arguments.threads)}
        common = ["--model", str(arguments.model)]
        router = [sys.executable, "-m", "kvrelay_router", *common, f"--port={held.port}"]
        routing = subprocess.Popen(router, env=environ, preexec_fn=die_with_parent())
        worker = [sys.executable, "-m", "benchmarks.step_stages", str(record), str(routing.pid), *common]
        worker += [f"--threads={arguments.threads}", f"--dtype={arguments.dtype}", "--num-blocks=4000"]
        worker += ["--max-running=64", "--worker-id=decode-0", *arguments.flag]
        working = subprocess.Popen(worker, env=environ, preexec_fn=die_with_parent())
        try:
            Router(routing, held.port).wait_ready({"prefill": 0, "decode": 1}, START_WITHIN_S)
            yield held.port
        finally:
            for each in (routing, working):
                each.send_signal(signal.SIGTERM)
                each.wait()


async def load(port: int, arguments: argparse.Namespace, num_streams: int) -> None:
    """Streams that begin together and end together."""
    rng = np.random.default_rng(num_streams)
    asks = [Ask(0.0, rng.integers(5, 2000, PROMPT_TOKENS), arguments.tokens) for _ in range(num_streams)]
    wire = Wire(token_ids=(0, 1 << 31), extra={"temperature": arguments.temperature})
    await send(port, arguments.name, LoadPoint("", asks), wire)


async def send(port: int, name: str, point: LoadPoint, wire: Wire) -> LoadOutcome:
    """Sends a load to the model `name`. Raises SystemExit if a request fails."""
    client = Client(Endpoint(f"http://127.0.0.1:{port}"))
    bodies = [client.request("POST", client.endpoint.path("completions"), wire.body(name, ask)) for ask in point.asks]
    try:
        outcome = await run_load(client, point, bodies, TIMEOUT_S, lambda _: None)
    finally:
        await client.close()
    failed = [each.error for each in outcome.records if each.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one with: {failed[0]}")
    return outcome


def measure(arguments: argparse.Namespace) -> list[Steps]:
    """Runs all loads on one worker."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "steps.jsonl"
        with serving(arguments, record) as port:
            arguments.name = served_name(port)
            for num_streams in (2, *arguments.batches):  # the first one warms up
                asyncio.run(load(port, arguments, num_streams))
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    decodes = [line for line in lines if not line["prompt_tokens"]]
    return [Steps(batch, [line for line in decodes if line["rows"] == batch][10:]) for batch in arguments.batches]


def served_name(port: int) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def report(measured: list[Steps], arguments: argparse.Namespace) -> str:
    head = [
        "# Where a decoding step's time goes",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f} at the end), "
        f"{arguments.threads} thread(s) for the model, {arguments.dtype}, temperature {arguments.temperature:g}, "
        f"CPython {platform.python_version()}. Microseconds per step. Repeat with `python -m benchmarks.step_profile`; "
        "the script's head says what is measured.",
        "",
    ]
    columns = [f"batch {each.num_rows}" for each in measured]
    stages = [each.stage_us() for each in measured]
    rows = [[name, *(f"{of_batch.get(name, 0.0):,.0f}" for of_batch in stages)] for name in stages[-1]]
    rows.sort(key=lambda row: -float(row[-1].replace(",", "")))
    rows.append(["not the forward", *(f"{each.share_beside:.1%}" for each in measured)])
    head += ["## Stages", "", *table(["stage", *columns], rows), ""]
    walls = [
        [f"{name}, {kind}", *(f"{each.wall_us(name)[at]:,.0f}" for each in measured)]
        for name in ("period", "gap")
        for at, kind in enumerate(("least", "median"))
    ]
    head += ["## By the wall's clock", "", *table(["", *columns], walls), ""]
    threads = [each.thread_us() for each in measured]
    names = dict.fromkeys(name for of_batch in reversed(threads) for name in of_batch)
    rows = [[name, *(f"{of_batch.get(name, 0.0):,.0f}" for of_batch in threads)] for name in names]
    return "\n".join([*head, "## Threads", "", *table(["thread", *columns], rows), ""])


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--flag", action="append", default=[], help="one more argument of the worker; repeatable")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = report(measure(arguments), arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
