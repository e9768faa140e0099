"""Fair shares over HTTP: what a light client gets beside a client that floods a stack of real processes.

Each case is `kvrelay up` on this machine with two API keys, which are two tenants. The light client sends one request
after another. It runs alone, then beside each flood, in turns, `--rounds` times over, so both see the same machine.
The flood is a process of its own, which keeps a number of requests open, each answer followed by the next request. The
light client begins when tokens of the flood come, with a request that is not counted; between turns the stack is left
until no request holds a block.

By default the devices are simulated: steps take the time of a profile, five times that of an 8B model on an H100, so
that the CPU time of all these processes counts for little. With `--device cpu` workers compute the demo model: then
what the flood takes from the light client is also CPU time of the cores that all processes share.

- TTFT and gap in milliseconds, 90th percentile of the light client's requests and of all its gaps between tokens, of
  all rounds together.
- ratio: of these to alone; in brackets the least and the most of single rounds.
- flood: output tokens per second of the flood's requests that ended in the turn.

Usage: python -m benchmarks.fair_http [--device simulated] [--rounds 3] [--requests 20] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from kvrelay_bench.answer_reader import Record
from kvrelay_bench.http import Client, Endpoint
from kvrelay_bench.workload import Shape, Wire, synthetic
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack

TIMEOUT_S = 300.0
NUM_PROMPTS = 400
MODES = {"1 prefill, 1 decode": ("--prefill", "1", "--decode", "1"), "colocated": ("--prefill", "0", "--decode", "1")}
SLOW_PROFILE = {
    "name": "slow",
    "fixed_s": 0.04,
    "token_s": 1.6e-4,
    "pair_s": 1e-8,
    "kv_bytes_per_token": 131_072,
    "kv_tokens": 400_000,
    "transfer_bytes_s": 8e9,
}
DEVICES = {
    "simulated": ("--backend", "simulated"),
    "cpu": ("--dtype", "float32", "--threads", "1", "--num-blocks", "6000", "--token-budget", "512"),
}


@dataclass(frozen=True, slots=True)
class Load:
    """`num_open` requests at a time, each with `n` samples."""

    name: str
    num_open: int
    num_prompt: int
    num_output: int
    n: int = 1

    def __str__(self) -> str:
        samples = f", n={self.n}" if self.n > 1 else ""
        return f"{self.num_open} open, {self.num_prompt:,} + {self.num_output:,} tokens{samples}"


LIGHT = Load("light", 1, 1024, 32)
FLOODS = (
    Load("many short", 48, 64, 16),
    Load("few long prompts", 6, 3000, 8),
    Load("long outputs", 48, 64, 512),
    Load("many long outputs", 200, 64, 512),
    Load("eight samples", 6, 64, 128, n=8),
)


@dataclass(slots=True)
class Turn:
    """A turn of the light client."""

    records: list[Record]
    flood_tokens_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return _p90([record.ttft_s for record in self.records])

    @property
    def gap_s(self) -> float:
        times = [record.pieces_s for record in self.records]
        return _p90([gap for each in times for gap in np.diff(each).tolist()])


@dataclass(slots=True)
class Outcome:
    """Turns by name of the flood, "" for alone, one for each round."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def together(self, name: str) -> Turn:
        """All rounds as one turn."""
        turns = self.turns[name]
        records = [record for turn in turns for record in turn.records]
        return Turn(records, float(np.median([turn.flood_tokens_s for turn in turns])))


class Sender:
    """Sends the requests of a load, with prompts that share nothing."""

    def __init__(self, url: str, key: str, model: str, load: Load, seed: int) -> None:
        self.client = Client(Endpoint(url, key))
        shape = Shape(num_prompt=load.num_prompt, num_output=load.num_output)
        extra = {"return_token_ids": True, "n": load.n, "temperature": 1.0 if load.n > 1 else 0.0}
        wire, path = Wire(extra=extra), self.client.endpoint.path("completions")
        asks = synthetic(shape, [0.0] * NUM_PROMPTS, seed)
        self._requests = [self.client.request("POST", path, wire.body(model, ask)) for ask in asks]
        self._num_sent = 0

    async def send(self, record: Record) -> None:
        """Raises RuntimeError if there is no whole answer."""
        request = self._requests[self._num_sent % len(self._requests)]
        self._num_sent += 1
        record.intended_s = self.client.clock()
        await self.client.send(request, record, TIMEOUT_S)
        if record.error:
            raise RuntimeError(record.error)


async def light_turn(url: str, model: str, num_requests: int, seed: int) -> list[Record]:
    """Sends one request more than is counted: the first one meets a flood that comes all at once."""
    sender = Sender(url, "light", model, LIGHT, seed)
    records = [Record(0.0) for _ in range(num_requests + 1)]
    for record in records:
        await sender.send(record)
    await sender.client.close()
    return records[1:]


async def flood(url: str, model: str, load: Load, seed: int) -> None:
    """Prints a line when tokens come. Ends when its input does, and then prints its output tokens per second."""
    sender, began, num_tokens = Sender(url, "flood", model, load, seed), time.perf_counter(), 0
    has_begun = asyncio.Event()

    async def client() -> None:
        nonlocal num_tokens
        while True:
            record = Record(0.0)
            sending = asyncio.ensure_future(sender.send(record))
            try:
                while not (has_begun.is_set() or record.pieces_s or sending.done()):
                    await asyncio.wait([sending], timeout=0.01)
                has_begun.set()
                await sending
            finally:
                sending.cancel()
            num_tokens += record.num_tokens

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(load.num_open)]
        await has_begun.wait()
        print("flooding", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for each in clients:
            each.cancel()
    print(num_tokens / (time.perf_counter() - began), flush=True)
    await sender.client.close()


@contextmanager
def flooding(url: str, model: str, load: Load, seed: int, turn: Turn) -> Iterator[None]:
    """Runs a flood in a process of its own for the block, then notes what it got in `turn`."""
    command = [sys.executable, "-m", "benchmarks.fair_http", "--child"]
    command.append(orjson.dumps({"url": url, "model": model, "seed": seed, "load": asdict(load)}).decode())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline().strip() != "flooding":
                raise RuntimeError(f"the flood {load.name!r} did not begin")
            yield
            process.stdin.close()
            turn.flood_tokens_s = float(process.stdout.readline())
        except BaseException:
            process.kill()
            raise


def make_stack(directory: Path, flags: Sequence[str], arguments: argparse.Namespace) -> Stack:
    if arguments.device == "simulated":
        profile = directory / "profile.json"
        profile.write_bytes(orjson.dumps(SLOW_PROFILE))
        flags = [*flags, "--profile", arguments.profile or str(profile)]
    keys = {"KVRELAY_API_KEYS": "light,flood"}
    return Stack(DEMO_MODEL, directory / "state", *flags, api_key="light", environ=keys)


def run_case(mode: str, arguments: argparse.Namespace) -> Outcome:
    """Starts a stack and runs all turns on it."""
    flags = [*MODES[mode], *DEVICES[arguments.device], *arguments.flag]
    outcome, seeds = Outcome(), iter(range(1, 1 << 30))
    floods = [load for load in FLOODS if arguments.flood in ("", load.name)]
    with (
        tempfile.TemporaryDirectory() as directory,
        make_stack(Path(directory), flags, arguments) as stack,
    ):
        asyncio.run(light_turn(stack.base_url, stack.model, 3, next(seeds)))  # warm
        for number in range(arguments.rounds):
            for load in (None, *floods):
                turn = Turn([])
                name = "" if load is None else load.name
                if load is None:
                    turn.records = asyncio.run(light_turn(stack.base_url, stack.model, arguments.requests, next(seeds)))
                else:
                    with flooding(stack.base_url, stack.model, load, next(seeds), turn):
                        turn.records = asyncio.run(
                            light_turn(stack.base_url, stack.model, arguments.requests, next(seeds))
                        )
                stack.wait_until_clean()
                outcome.turns.setdefault(name, []).append(turn)
                print(
                    f"{mode}, round {number + 1}, {name or 'alone'}: TTFT {1e3 * turn.ttft_s:.0f} ms, "
                    f"gap {1e3 * turn.gap_s:.1f} ms, flood {turn.flood_tokens_s:,.0f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
    return outcome


def rows_of(outcome: Outcome) -> Iterator[str]:
    """The rows of a case's table."""
    alone = outcome.together("")
    yield f"| alone | {1e3 * alone.ttft_s:,.0f} | | {1e3 * alone.gap_s:,.1f} | | |"
    for load in FLOODS:
        if load.name not in outcome.turns:
            continue
        beside, pairs = outcome.together(load.name), list(zip(outcome.turns[load.name], outcome.turns[""], strict=True))
        ttft = [turn.ttft_s / other.ttft_s for turn, other in pairs]
        gap = [turn.gap_s / other.gap_s for turn, other in pairs]
        yield (
            f"| {load.name} ({load}) | {1e3 * beside.ttft_s:,.0f} | {beside.ttft_s / alone.ttft_s:.2f} {_range(ttft)} "
            f"| {1e3 * beside.gap_s:,.1f} | {beside.gap_s / alone.gap_s:.2f} {_range(gap)} "
            f"| {beside.flood_tokens_s:,.0f} |"
        )


def _p90(values: Sequence[float]) -> float:
    return float(np.percentile(values, 90))


def _range(values: Sequence[float]) -> str:
    return f"({min(values):.2f} to {max(values):.2f})"


def report(arguments: argparse.Namespace) -> str:
    profile = arguments.profile or "a fifth of the speed of an 8B model on an H100"
    device = f"simulated devices, {profile}" if arguments.device == "simulated" else "demo model"
    lines = [
        f"# Fair shares over HTTP: {device}",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start. Light client: "
        f"{arguments.requests} requests of {LIGHT.num_prompt} + {LIGHT.num_output} tokens a turn, one after another; "
        f"{arguments.rounds} rounds. Repeat with `python -m benchmarks.fair_http --device {arguments.device}"
        f"{''.join(f' --flag={each}' for each in arguments.flag)}`; the script's head says what is measured.",
    ]
    for mode in MODES:
        if arguments.mode in ("", mode):
            lines += ["", f"## {mode[0].upper()}{mode[1:]}", ""]
            lines.append("| beside | TTFT p90, ms | ratio | gap p90, ms | ratio | flood, tokens/s |")
            lines.append("|---|---:|---:|---:|---:|---:|")
            lines += rows_of(run_case(mode, arguments))
    lines += ["", f"Load at the end: {os.getloadavg()[0]:.1f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEVICES), default="simulated")
    parser.add_argument("--profile", default="", help="of simulated devices, instead of the slow one")
    parser.add_argument("--mode", choices=list(MODES), default="", help="only this one")
    parser.add_argument("--flood", choices=[load.name for load in FLOODS], default="", help="only this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20, help="of the light client in a turn")
    parser.add_argument("--flag", action="append", default=[], help="a further flag of `kvrelay up`")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        asked: dict[str, Any] = orjson.loads(arguments.child)
        asyncio.run(flood(asked["url"], asked["model"], Load(**asked["load"]), asked["seed"]))
        return
    text = report(arguments)
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
