"""Throughput of the transfer between two processes, against a plain memcpy of the same blocks between two processes.

    python benchmarks/transfer.py [--repeats 9] [--output benchmarks/results/transfer.md]

One push of scattered blocks, from the call of `push` in the one process to the last `Landed` in the other. The
yardstick copies as many blocks, one by one, out of a pool that both processes map. The first run of each is thrown
away, and runs of all contenders take turns, so that a busy machine is unfair to all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from kvrelay.transfer.base import BlockCopy, Landed
from kvrelay.transfer.wire import Bytes
from kvrelay.transfer.zmq_transport import ZmqReceiver, ZmqSender

BLOCK_SIZES_KIB = (16, 64, 512, 2048)
POOL_BYTES = 256 << 20
PUSH_BYTES = 64 << 20
PUSH_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PushOrder:
    """What the sending process is asked to push. An empty endpoint ends it."""

    reservation: str = ""
    endpoint: dict[str, str] = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """Throughputs in GB/s, one of each per repeat."""

    block_kib: int
    memcpy: list[float]
    local: list[float]
    tcp: list[float]


def send_as_ordered(memory_name: str, block_bytes: int, orders: Connection) -> None:
    """The sending process: answers each order with the time of its push."""
    memory = SharedMemory(memory_name)

    async def serve(pool: Bytes) -> None:
        sender = ZmqSender(pool)
        sender.start(lambda event: None)
        while (order := await asyncio.to_thread(orders.recv)).endpoint:
            pairs = zip(order.sources, order.slots, strict=True)
            copies = [BlockCopy(index, source, slot) for index, (source, slot) in enumerate(pairs)]
            orders.send(time.monotonic())
            sender.push(order.reservation, order.endpoint, copies)
        sender.close()

    asyncio.run(serve(np.ndarray((POOL_BYTES // block_bytes, block_bytes), np.uint8, memory.buf)))
    memory.close()


class Pair:
    """The receiving end in this process, and the sending process beside it."""

    def __init__(self, block_bytes: int, seed: int) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = POOL_BYTES // block_bytes
        self.memory = SharedMemory(create=True, size=POOL_BYTES)
        self.source: Bytes = np.ndarray((self.num_blocks, block_bytes), np.uint8, self.memory.buf)
        self.random = np.random.default_rng(seed)
        self.source[:] = self.random.integers(0, 256, self.source.shape, np.uint8)
        self.target: Bytes = np.ones_like(self.source)
        self.receiver = ZmqReceiver(self.target)
        self.orders, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(
            target=send_as_ordered, args=(self.memory.name, block_bytes, theirs), daemon=True
        )
        self.process.start()
        self.num_pushes = 0

    def scattered(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sources and slots of one push, drawn at random from the whole pools."""
        count = PUSH_BYTES // self.block_bytes
        sources, slots = (tuple(self.random.permutation(self.num_blocks)[:count].tolist()) for _ in range(2))
        return sources, slots

    def memcpy(self) -> float:
        """GB/s of copying block by block out of the memory that both map."""
        sources, slots = self.scattered()
        began = time.monotonic()
        for source, slot in zip(sources, slots, strict=True):
            self.target[slot] = self.source[source]
        return PUSH_BYTES / (time.monotonic() - began) / 1e9

    async def push(self, landed: asyncio.Queue[Landed], endpoint: dict[str, str]) -> float:
        """GB/s of one push. Raises TimeoutError, and AssertionError if the bytes are not the same."""
        sources, slots = self.scattered()
        self.num_pushes += 1
        reservation = str(self.num_pushes)
        self.receiver.admit(reservation, 0, slots)
        self.orders.send(PushOrder(reservation, endpoint, sources, slots))
        num_landed = 0
        async with asyncio.timeout(PUSH_TIMEOUT_S):
            while num_landed < len(slots):
                num_landed += len((await landed.get()).blocks)
        ended = time.monotonic()
        began = await asyncio.to_thread(self.orders.recv)
        self.receiver.release(reservation)
        assert all(np.array_equal(self.target[b], self.source[a]) for a, b in zip(sources, slots, strict=True))
        return float(PUSH_BYTES / (ended - began) / 1e9)

    def close(self) -> None:
        """Ends the other process and gives the memory back."""
        self.orders.send(PushOrder())
        self.process.join()
        self.receiver.close()
        del self.source
        self.memory.close()
        self.memory.unlink()


async def measure(block_kib: int, repeats: int) -> Row:
    """All contenders for one block size."""
    pair = Pair(block_kib << 10, seed=block_kib)
    landed: asyncio.Queue[Landed] = asyncio.Queue()
    pair.receiver.start(landed.put_nowait)
    local = pair.receiver.endpoint
    tcp = {"address": local["address"]}
    row = Row(block_kib, [], [], [])
    for repeat in range(repeats + 1):
        figures = pair.memcpy(), await pair.push(landed, local), await pair.push(landed, tcp)
        if repeat:
            row.memcpy.append(figures[0])
            row.local.append(figures[1])
            row.tcp.append(figures[2])
    pair.close()
    return row


def table(rows: list[Row], repeats: int, load: float) -> str:
    """The results as a Markdown page. `load`: processes that wanted to run before the benchmark began."""
    about = (
        f"{PUSH_BYTES >> 20} MiB a push, blocks scattered over pools of {POOL_BYTES >> 20} MiB on both sides; GB/s, "
        f"median (min-max) of {repeats} runs. The contenders take turns; a ratio is the median over the turns.\n"
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, load average {load:.1f} before the run; "
        f"Python {platform.python_version()}. "
        "Repeat with `python benchmarks/transfer.py`."
    )
    lines = [
        "# Transfer between two processes of one machine",
        "",
        about,
        "",
        "| block KiB | memcpy block by block | zmq, Unix socket | ratio | zmq, TCP loopback | ratio |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        local = [a / b for a, b in zip(row.local, row.memcpy, strict=True)]
        tcp = [a / b for a, b in zip(row.tcp, row.memcpy, strict=True)]
        cells = (spread(row.memcpy), spread(row.local), ratio(local), spread(row.tcp), ratio(tcp))
        lines.append(f"| {row.block_kib} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(figures: list[float]) -> str:
    """Median (min-max)."""
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


def ratio(figures: list[float]) -> str:
    """The median alone."""
    return f"{statistics.median(figures):.2f}"


def main() -> None:
    """Reads the flags, measures, shows the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [asyncio.run(measure(kib, arguments.repeats)) for kib in BLOCK_SIZES_KIB]
    page = table(rows, arguments.repeats, load)
    sys.stdout.write(page)
    if arguments.output is not None:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()
