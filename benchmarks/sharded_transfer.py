"""Transfers between workers with equal and unequal numbers of ranks.

Run: python -m benchmarks.sharded_transfer [--repeats 9] [--transport zmq] [--processes]
One push of scattered blocks, from the call of `push` to the last `Landed`, of the shape of Qwen3-0.6B in bfloat16. The
blocks have 1.75 MiB in all, whatever the ranks. Sizes take turns. With `--processes` each rank is a process, as in a
worker; otherwise all ranks are in this one. Prints the median GB/s with its quartiles, its share of that between
workers which both have as many ranks as the larger one, messages and runs per block, and with `--processes` the CPU
time of all ranks of a worker for one push.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.rank_processes import RankProcesses
from kvrelay.handoff.transports.base import (
    BlockPush,
    Landed,
    ReceiverEvent,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.nixl_agent import devices_for
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender
from kvrelay.kv.shard_map import ShardShape
from kvrelay.ranks.transfers import RemoteReceiver, RemoteSender

NUM_LAYERS, NUM_HEADS, HEAD_BYTES = 28, 8, 16 * 128 * 2  # of 16 tokens of a head
NUM_BLOCKS, PUSHED = 64, 32
GIVE_UP_S = 60.0
SIZES = ((1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (4, 4))
HOST = "127.0.0.1"
"""Of all workers. NIXL is restricted to its device, as by a worker: with several, UCX sometimes hangs."""


ADMISSION_WAIT_S = 5.0
"""A rank's process may have a block before its call to admit it."""


def pool_of(block_bytes: int) -> Bytes:
    """A rank's pool."""
    return np.ones((NUM_BLOCKS, block_bytes), np.uint8)


def make_sender(transport: str, block_bytes: int) -> TransferSender:
    if transport == "zmq":
        return ZmqSender(pool_of(block_bytes))
    return NixlSender(pool_of(block_bytes), settings=NixlSettings(ucx_devices=devices_for(HOST)))


def make_receiver(transport: str, block_bytes: int) -> TransferReceiver:
    if transport == "zmq":
        return ZmqReceiver(pool_of(block_bytes), admission_wait_s=ADMISSION_WAIT_S)
    return NixlReceiver(pool_of(block_bytes), ucx_devices=devices_for(HOST), admission_wait_s=ADMISSION_WAIT_S)


class Pair:
    """Two workers. `processes`: those of their ranks, if each rank has its own."""

    def __init__(self, sizes: tuple[int, int], transport: str, *, in_processes: bool = False) -> None:
        self._source, target = (ShardShape(size, NUM_HEADS) for size in sizes)
        layouts = [ShardLayout(shape, NUM_LAYERS, HEAD_BYTES) for shape in (self._source, target)]
        makes = partial(make_sender, transport), partial(make_receiver, transport)
        senders: Sequence[TransferSender]
        receivers: Sequence[TransferReceiver]
        self.processes: list[RankProcesses] = []
        if in_processes:
            self.processes = [
                RankProcesses(sizes[0], makes[0], block_bytes_of(self._source)),
                RankProcesses(sizes[1], makes[1], block_bytes_of(target)),
            ]
            senders = [RemoteSender(1 + rank, self.processes[0].group, transport) for rank in range(sizes[0])]
            receivers = [
                RemoteReceiver(1 + rank, self.processes[1].group, transport, is_one_sided=transport == "nixl")
                for rank in range(sizes[1])
            ]
        else:
            senders = [makes[0](block_bytes_of(self._source)) for _ in range(sizes[0])]
            receivers = [makes[1](block_bytes_of(target)) for _ in range(sizes[1])]
        self.sender = ShardedSender(senders, layouts[0])
        self.receiver = ShardedReceiver(receivers, layouts[1])
        self._num_landed = 0
        self._failure: TransferFailed | None = None
        self._done = asyncio.Event()
        self.sender.start(self._sent)
        self.receiver.start(self._landed)

    def _sent(self, event: SenderEvent) -> None:
        if isinstance(event, TransferFailed):
            self._failure = event
            self._done.set()

    def _landed(self, event: ReceiverEvent) -> None:
        assert isinstance(event, Landed)
        self._num_landed += len(event.blocks)
        if self._num_landed == PUSHED:
            self._done.set()

    async def push(self, name: str) -> float:
        """Seconds of one push. Raises RuntimeError if it failed, TimeoutError if no end is reported."""
        random = np.random.default_rng(0)
        sources, slots = (random.permutation(NUM_BLOCKS)[:PUSHED].tolist() for _ in range(2))
        self._num_landed = 0
        self._done.clear()
        self.receiver.admit(name, 0, slots, self._source)
        copies = [BlockPush(index, *pair) for index, pair in enumerate(zip(sources, slots, strict=True))]
        start = time.perf_counter()
        self.sender.push(name, self.receiver.endpoints, copies)
        await asyncio.wait_for(self._done.wait(), GIVE_UP_S)
        taken = time.perf_counter() - start
        if self._failure is not None:
            raise RuntimeError(f"{name}: {self._failure.cause}")
        self.receiver.release(name)
        return taken

    def cpu_s(self) -> list[float]:
        """CPU seconds of the ranks of each worker so far. Empty if they are in this process."""
        return [each.cpu_s() for each in self.processes]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for each in self.processes:
            each.close()


def block_bytes_of(shape: ShardShape) -> int:
    """The bytes of a rank's block."""
    return 2 * NUM_LAYERS * shape.heads_per_rank * HEAD_BYTES


async def run(repeats: int, transport: str, *, in_processes: bool = False) -> str:
    """Returns the table."""
    pairs = {sizes: Pair(sizes, transport, in_processes=in_processes) for sizes in SIZES}
    taken: dict[tuple[int, int], list[float]] = {sizes: [] for sizes in SIZES}
    cpu: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for repeat in range(repeats + 1):
        for sizes, pair in pairs.items():
            taken[sizes].append(await pair.push(f"r{repeat}"))
        if not repeat:  # connected, and all pages are there
            cpu = {sizes: np.array(pair.cpu_s()) for sizes, pair in pairs.items()}
    used = {sizes: 1e3 * (np.array(pair.cpu_s()) - cpu[sizes]) / repeats for sizes, pair in pairs.items()}
    num_bytes = PUSHED * 2 * NUM_LAYERS * NUM_HEADS * HEAD_BYTES
    speeds = {sizes: [num_bytes / each / 1e9 for each in times[1:]] for sizes, times in taken.items()}
    names = ["Ranks", "GB/s", "Of equal sizes", "Messages per block", "Runs per block"]
    names += ["CPU of senders, ms", "Of receivers, ms"] if in_processes else []
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for sizes, pair in pairs.items():
        speed, equal = (statistics.median(speeds[each]) for each in (sizes, (max(sizes), max(sizes))))
        low, high = np.percentile(speeds[sizes], (25, 75))
        messages, runs = (
            sum(getattr(each, name) for each in pair.sender.counters) / PUSHED / (repeats + 1)
            for name in ("num_messages", "num_runs")
        )
        cells = [f"{sizes[0]}:{sizes[1]}", f"{speed:.2f} ({low:.2f}-{high:.2f})", f"{speed / equal:.2f}"]
        cells += [f"{messages:.2f}", f"{runs:.2f}", *(f"{each:.1f}" for each in used[sizes])]
        lines.append(f"| {' | '.join(cells)} |")
        pair.close()
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transport", choices=("zmq", "nixl"), default="zmq")
    parser.add_argument("--processes", action="store_true", help="each rank is a process")
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["benchmarks.rank_processes", "kvrelay.handoff.transports.nixl_sender"])
    where = "each rank in a process" if arguments.processes else "all ranks in one process"
    print(f"{arguments.transport}, {where}; {platform.machine()}, {len(os.sched_getaffinity(0))} cores.\n")
    print(asyncio.run(run(arguments.repeats, arguments.transport, in_processes=arguments.processes)))


if __name__ == "__main__":
    main()
