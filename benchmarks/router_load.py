"""A load on the router from a process of its own: ordinary sockets, reused connections, a token an event.

Closed loop (`--concurrency` clients, `--requests` in all) or open loop (`--rate` requests a second). Prints one JSON
object: requests, events, seconds, failures, and percentiles of the time to the first event and to the end, in ms.

Usage: python -m benchmarks.router_load --port 8000 --model NAME --concurrency 64 --requests 1000 --tokens 32
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from string import ascii_lowercase

from kvrelay.process import event_loop_factory

WORDS = ["otter", "river", "bank", "fish", "swim", "stone", "water", "night", "light", "tree", "leaf", "wind", "rain"]
WORDS += ["snow", "path", "field", "house", "door"]
MAX_BODIES = 2048
NUM_GROUPS = 16
END = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Outcome:
    """What the clients saw; times in seconds."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_events: int = 0
    failures: list[str] = field(default_factory=list)


def make_bodies(arguments: argparse.Namespace) -> list[bytes]:
    """Whole HTTP requests. The first half of each prompt is that of one in 16 of the others, the same in all runs; the
    second one is new, or what a router remembers of texts and prefixes would be all of them."""
    draw = random.Random(3)
    shared = [prompt_text(arguments.prompt_chars // 2, draw) for _ in range(NUM_GROUPS)]
    draw = random.Random(time.time_ns())
    text = new_words if arguments.new_words else prompt_text
    bodies = []
    for number in range(min(MAX_BODIES, arguments.requests)):
        prompt = shared[number % NUM_GROUPS] + " " + text(arguments.prompt_chars // 2, draw)
        asked = {"model": arguments.model, "stream": True, "max_tokens": arguments.tokens, "temperature": 0}
        content = {"messages": [{"role": "user", "content": prompt}]} if arguments.chat else {"prompt": prompt}
        body = json.dumps(asked | content).encode()
        path = "chat/completions" if arguments.chat else "completions"
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        bodies.append(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return bodies


def prompt_text(num_chars: int, draw: random.Random) -> str:
    """Words of about so many characters."""
    words = []
    while num_chars > 0:
        words.append(draw.choice(WORDS))
        num_chars -= len(words[-1]) + 1
    return " ".join(words)


def new_words(num_chars: int, draw: random.Random) -> str:
    """Seven random letters each, so a tokenizer finds none in its cache."""
    return " ".join("".join(draw.choices(ascii_lowercase, k=7)) for _ in range(num_chars // 8))


class Connection:
    """One client that reuses its connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, body: bytes, outcome: Outcome) -> None:
        """One request to its end."""
        started = time.perf_counter()
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader = self._reader
        self._writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            outcome.failures.append(head.decode(errors="replace")[:200])
            self._writer.close()
            self._reader = self._writer = None
            return
        first, tail = 0.0, b""
        while not tail.endswith(END):
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("the stream was cut off")
            if not first:
                first = time.perf_counter()
            outcome.num_events += data.count(b"data: {")
            tail = (tail + data)[-len(END) :]
        outcome.first_s.append(first - started)
        outcome.total_s.append(time.perf_counter() - started)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def closed_loop(arguments: argparse.Namespace, bodies: Iterator[bytes], outcome: Outcome) -> None:
    """Each client sends its next request when the last one has ended."""
    left = itertools.count(arguments.requests, -1)

    async def client() -> None:
        connection = Connection(arguments.port)
        while next(left) > 0:
            await connection.run(next(bodies), outcome)
        connection.close()

    await asyncio.gather(*(client() for _ in range(arguments.concurrency)))


async def open_loop(arguments: argparse.Namespace, bodies: Iterator[bytes], outcome: Outcome) -> None:
    """Requests come at their own times, as from many independent clients."""
    draw = random.Random(5)
    idle: list[Connection] = []
    tasks = []

    async def one(body: bytes) -> None:
        connection = idle.pop() if idle else Connection(arguments.port)
        await connection.run(body, outcome)
        idle.append(connection)

    due = time.perf_counter()
    for _ in range(arguments.requests):
        due += draw.expovariate(arguments.rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(next(bodies))))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()


def percentile(values: list[float], share: float) -> float:
    """In ms; 0 where there is nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3) if ordered else 0.0


async def run(arguments: argparse.Namespace) -> None:
    """Runs the load, prints the outcome."""
    outcome, bodies = Outcome(), itertools.cycle(make_bodies(arguments))
    started = time.perf_counter()
    await (open_loop if arguments.rate else closed_loop)(arguments, bodies, outcome)
    seconds = time.perf_counter() - started
    result = {
        "requests": len(outcome.total_s),
        "tokens": len(outcome.total_s) * arguments.tokens,
        "events": outcome.num_events,
        "seconds": seconds,
        "failures": len(outcome.failures),
        "failure": next(iter(outcome.failures), ""),
        "first_p50_ms": percentile(outcome.first_s, 0.5),
        "first_p99_ms": percentile(outcome.first_s, 0.99),
        "total_p50_ms": percentile(outcome.total_s, 0.5),
        "client_cpu_s": time.process_time(),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-chars", type=int, default=2000)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--new-words", action="store_true", help="words that no earlier prompt had")
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
