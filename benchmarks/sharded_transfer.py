"""Transfers between workers with equal and unequal numbers of ranks, in one process.

Run: python -m benchmarks.sharded_transfer [--repeats 9] [--transport zmq]
One push of scattered blocks, from the call of `push` to the last `Landed`, of the shape of Qwen3-0.6B in bfloat16. The
blocks have 1.75 MiB in all, whatever the ranks. Sizes take turns. Prints the median GB/s, its share of that between
workers which both have as many ranks as the larger one, and messages and runs per block.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvrelay.kv.shard_map import ShardShape
from kvrelay.transfer.base import (
    BlockPush,
    Landed,
    ReceiverEvent,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.transfer.nixl_transport import NixlReceiver, NixlSender, NixlSettings
from kvrelay.transfer.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.transfer.ucx_devices import devices_for
from kvrelay.transfer.wire import Bytes
from kvrelay.transfer.zmq_transport import ZmqReceiver, ZmqSender

NUM_LAYERS, NUM_HEADS, HEAD_BYTES = 28, 8, 16 * 128 * 2  # of 16 tokens of a head
NUM_BLOCKS, PUSHED = 64, 32
GIVE_UP_S = 60.0
SIZES = ((1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (4, 4))
HOST = "127.0.0.1"
"""Of all workers. NIXL is restricted to its device, as by a worker: with several, UCX sometimes hangs."""


def nixl_sender(pool: Bytes) -> NixlSender:
    return NixlSender(pool, settings=NixlSettings(ucx_devices=devices_for(HOST)))


def nixl_receiver(pool: Bytes) -> NixlReceiver:
    return NixlReceiver(pool, ucx_devices=devices_for(HOST))


SENDERS: dict[str, Callable[[Bytes], TransferSender]] = {"zmq": ZmqSender, "nixl": nixl_sender}
RECEIVERS: dict[str, Callable[[Bytes], TransferReceiver]] = {"zmq": ZmqReceiver, "nixl": nixl_receiver}


def pools(shape: ShardShape) -> list[Bytes]:
    """A pool for each rank."""
    block_bytes = 2 * NUM_LAYERS * shape.heads_per_rank * HEAD_BYTES
    return [np.ones((NUM_BLOCKS, block_bytes), np.uint8) for _ in range(shape.size)]


class Pair:
    """Two workers."""

    def __init__(self, sizes: tuple[int, int], transport: str) -> None:
        self._source, target = (ShardShape(size, NUM_HEADS) for size in sizes)
        layouts = [ShardLayout(shape, NUM_LAYERS, HEAD_BYTES) for shape in (self._source, target)]
        self.sender = ShardedSender([SENDERS[transport](pool) for pool in pools(self._source)], layouts[0])
        self.receiver = ShardedReceiver([RECEIVERS[transport](pool) for pool in pools(target)], layouts[1])
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


async def run(repeats: int, transport: str) -> None:
    pairs = {sizes: Pair(sizes, transport) for sizes in SIZES}
    taken: dict[tuple[int, int], list[float]] = {sizes: [] for sizes in SIZES}
    for repeat in range(repeats + 1):
        for sizes, pair in pairs.items():
            taken[sizes].append(await pair.push(f"r{repeat}"))
    num_bytes = PUSHED * 2 * NUM_LAYERS * NUM_HEADS * HEAD_BYTES
    speeds = {sizes: num_bytes / statistics.median(each[1:]) / 1e9 for sizes, each in taken.items()}
    print(
        f"{transport}\n\n| ranks | GB/s | of equal sizes | messages per block | runs per block |\n|---|---|---|---|---|"
    )
    for sizes, pair in pairs.items():
        speed = speeds[sizes]
        share = speed / speeds[max(sizes), max(sizes)]
        messages, runs = (
            sum(getattr(each, name) for each in pair.sender.counters) / PUSHED / (repeats + 1)
            for name in ("num_messages", "num_runs")
        )
        print(f"| {sizes[0]}:{sizes[1]} | {speed:.2f} | {share:.2f} | {messages:.2f} | {runs:.2f} |")
        pair.sender.close()
        pair.receiver.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transport", choices=sorted(SENDERS), default="zmq")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.repeats, arguments.transport))


if __name__ == "__main__":
    main()
