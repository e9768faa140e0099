"""Throughput of the transfer between two processes, against a plain memcpy of the same blocks between two processes.

    python -m benchmarks.transfer [--repeats 9] [--output benchmarks/results/transfer.md]

One push of scattered blocks, from the call of `push` in the one process to the last `Landed` in the other. The
yardstick copies as many blocks, one by one, out of a pool that both processes map; the others send a copy of it that
lies in ordinary memory, as a worker's pool does. The first run of each is thrown away, and runs of all contenders take
turns, so that a busy machine is unfair to all alike. NIXL takes part where it is installed, over the loopback device
alone unless UCX_NET_DEVICES says otherwise: with several devices UCX sometimes hangs. With checksums, both ends take a
CRC-32 of every block.
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

from kvrelay.handoff.transports.base import BlockPush, Landed, ReceiverEvent, TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_agent import VARIABLE, TransportUnavailable, devices_for, import_api
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender
from kvrelay.handoff.transports.pool_memory import PoolChecksums
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender

BLOCK_SIZES_KIB = (16, 64, 512, 2048)
POOL_BYTES = 256 << 20
PUSH_BYTES = 64 << 20
PUSH_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Contender:
    """A way to transfer. `words`: of the receiver's endpoint, those that the sender is told; None: all."""

    title: str
    transport: str
    words: tuple[str, ...] | None = None
    checksums: bool = False


ZMQ = (
    Contender("zmq, Unix socket", "zmq"),
    Contender("zmq, Unix socket, checksums", "zmq", checksums=True),
    Contender("zmq, TCP loopback", "zmq", ("address",)),
)
NIXL = (
    Contender("nixl", "nixl"),
    Contender("nixl, checksums", "nixl", checksums=True),
)


@dataclass(frozen=True)
class PushOrder:
    """What the sending process is asked to push. Without a transport it ends."""

    transport: str = ""
    checksums: bool = False
    reservation: str = ""
    endpoint: dict[str, str] = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass
class Row:
    """Throughputs in GB/s, one of each per repeat. `posting`: share of NIXL's time that its sender spent in posting."""

    block_kib: int
    memcpy: list[float] = field(default_factory=list)
    pushes: dict[str, list[float]] = field(default_factory=dict)
    posting: float = 0.0


def has_nixl() -> bool:
    """Whether NIXL works on this machine."""
    try:
        import_api()
    except TransportUnavailable:
        return False
    return True


def send_as_ordered(memory_name: str, block_bytes: int, with_nixl: bool, orders: Connection) -> None:
    """The sending process: answers each order with the time of its push, and seconds of posting since the start."""
    memory = SharedMemory(memory_name)

    async def serve(pool: Bytes) -> None:
        senders: dict[tuple[str, bool], TransferSender] = {}
        for checksums in (None, PoolChecksums(pool)):
            senders["zmq", checksums is not None] = ZmqSender(pool, checksums=checksums)
            if with_nixl:
                senders["nixl", checksums is not None] = NixlSender(pool, checksums=checksums)
        for sender in senders.values():
            sender.start(lambda event: None)
        while (order := await asyncio.to_thread(orders.recv)).transport:
            pairs = zip(order.sources, order.slots, strict=True)
            copies = [BlockPush(index, source, slot) for index, (source, slot) in enumerate(pairs)]
            nixl = senders.get(("nixl", False))
            orders.send((time.monotonic(), nixl.counters.post_s if isinstance(nixl, NixlSender) else 0.0))
            senders[order.transport, order.checksums].push(order.reservation, order.endpoint, copies)
        for sender in senders.values():
            sender.close()

    pool = np.ndarray((POOL_BYTES // block_bytes, block_bytes), np.uint8, memory.buf).copy()
    memory.close()
    asyncio.run(serve(pool))


class Pair:
    """The receiving ends in this process, and the sending process beside it."""

    def __init__(self, block_bytes: int, seed: int, *, with_nixl: bool) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = POOL_BYTES // block_bytes
        self.memory = SharedMemory(create=True, size=POOL_BYTES)
        self.source: Bytes = np.ndarray((self.num_blocks, block_bytes), np.uint8, self.memory.buf)
        self.random = np.random.default_rng(seed)
        self.source[:] = self.random.integers(0, 256, self.source.shape, np.uint8)
        self.target: Bytes = np.ones_like(self.source)
        self.landed: asyncio.Queue[Landed] = asyncio.Queue()
        self.receivers: dict[str, TransferReceiver] = {"zmq": ZmqReceiver(self.target)}
        if with_nixl:
            self.receivers["nixl"] = NixlReceiver(self.target)
        self.orders, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(
            target=send_as_ordered, args=(self.memory.name, block_bytes, with_nixl, theirs), daemon=True
        )
        self.process.start()
        self.num_pushes = 0
        self.nixl_s = self.post_s = 0.0

    def start(self) -> None:
        """On the event loop's thread."""
        for receiver in self.receivers.values():
            receiver.start(self.take)

    def take(self, event: ReceiverEvent) -> None:
        """Blocks that came in true."""
        if isinstance(event, Landed):
            self.landed.put_nowait(event)

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

    async def push(self, contender: Contender) -> float:
        """GB/s of one push. Raises TimeoutError, and AssertionError if the bytes are not the same."""
        sources, slots = self.scattered()
        self.num_pushes += 1
        reservation = str(self.num_pushes)
        receiver = self.receivers[contender.transport]
        receiver.admit(reservation, 0, slots)
        self.orders.send(
            PushOrder(
                contender.transport, contender.checksums, reservation, self.endpoint_for(contender), sources, slots
            )
        )
        num_landed = 0
        async with asyncio.timeout(PUSH_TIMEOUT_S):
            while num_landed < len(slots):
                num_landed += len((await self.landed.get()).blocks)
        ended = time.monotonic()
        began, self.post_s = await asyncio.to_thread(self.orders.recv)
        receiver.release(reservation)
        assert all(np.array_equal(self.target[b], self.source[a]) for a, b in zip(sources, slots, strict=True))
        if contender is NIXL[0]:
            self.nixl_s += ended - began
        return float(PUSH_BYTES / (ended - began) / 1e9)

    def endpoint_for(self, contender: Contender) -> dict[str, str]:
        """What the sender is told."""
        endpoint = self.receivers[contender.transport].endpoint
        told: dict[str, str] = {word: endpoint[word] for word in contender.words or endpoint}
        return told

    def close(self) -> None:
        """Ends the other process and gives the memory back."""
        self.orders.send(PushOrder())
        self.process.join()
        for receiver in self.receivers.values():
            receiver.close()
        del self.source
        self.memory.close()
        self.memory.unlink()


async def measure(block_kib: int, repeats: int, contenders: tuple[Contender, ...]) -> Row:
    """All contenders for one block size."""
    pair = Pair(block_kib << 10, seed=block_kib, with_nixl=NIXL[0] in contenders)
    pair.start()
    row = Row(block_kib, pushes={contender.title: [] for contender in contenders})
    for repeat in range(repeats + 1):
        memcpy = pair.memcpy()
        figures = {contender.title: await pair.push(contender) for contender in contenders}
        if repeat:
            row.memcpy.append(memcpy)
            for title, figure in figures.items():
                row.pushes[title].append(figure)
    row.posting = pair.post_s / pair.nixl_s if pair.nixl_s else 0.0
    pair.close()
    return row


def table(rows: list[Row], repeats: int, load: float) -> str:
    """The results as a Markdown page. `load`: processes that wanted to run before the benchmark began."""
    about = (
        f"{PUSH_BYTES >> 20} MiB a push, blocks scattered over pools of {POOL_BYTES >> 20} MiB on both sides; GB/s, "
        f"median (min-max) of {repeats} runs. The contenders take turns; a ratio is the median over the turns.\n"
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, load average {load:.1f} before the run; "
        f"Python {platform.python_version()}. "
        "Repeat with `python -m benchmarks.transfer`."
    )
    titles = list(rows[0].pushes)
    lines = [
        "# Transfer between two processes of one machine",
        "",
        about,
        "",
        "| block KiB | memcpy block by block | " + " | ".join(f"{title} | ratio" for title in titles) + " |",
        "|--:|--:|" + "--:|--:|" * len(titles),
    ]
    for row in rows:
        cells = [spread(row.memcpy)]
        for figures in row.pushes.values():
            cells += [spread(figures), ratio([a / b for a, b in zip(figures, row.memcpy, strict=True)])]
        lines.append(f"| {row.block_kib} | " + " | ".join(cells) + " |")
    if any(row.posting for row in rows):
        shares = ", ".join(f"{row.posting:.0%} at {row.block_kib} KiB" for row in rows)
        lines += ["", f"Of NIXL's time its sender spent in posting, which is where UCX copies: {shares}."]
    return "\n".join(lines) + "\n"


def spread(figures: list[float]) -> str:
    """Median (min-max)."""
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


def ratio(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f}"


def main() -> None:
    """Reads the flags, measures, shows the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    contenders = ZMQ + NIXL if has_nixl() else ZMQ
    if NIXL[0] in contenders and VARIABLE not in os.environ:
        os.environ[VARIABLE] = devices_for("127.0.0.1")  # of the sending processes too
    rows = [asyncio.run(measure(kib, arguments.repeats, contenders)) for kib in BLOCK_SIZES_KIB]
    page = table(rows, arguments.repeats, load)
    sys.stdout.write(page)
    if arguments.output is not None:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()
