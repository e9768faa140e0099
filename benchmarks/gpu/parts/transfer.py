"""KV blocks from one process to another on the same device, against copies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.part import Part
from benchmarks.transfer import has_nixl
from kvrelay.engine.run.block_copies import DevicePool
from kvrelay.handoff.transports.base import (
    BlockPush,
    Landed,
    ReceiverEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender

ABOUT = (
    "Scattered blocks of the model's size between pools of two processes on the one device, from the call of `push` to "
    "the last block's arrival; every byte is compared afterwards. zmq goes through pinned host memory on both sides, "
    "nixl from device memory to device memory. Of the copy: the rate over that of a copy within the device (bytes "
    "written); of the host's way: over that of a copy to the host and back, one after the other."
)
_PUSH_TIMEOUT_S = 60.0
_SEED = 11

Senders = dict[str, Callable[[DevicePool], TransferSender]]
SENDERS: Senders = {"zmq": ZmqSender, "nixl": NixlSender}
RECEIVERS: dict[str, Callable[[DevicePool], TransferReceiver]] = {"zmq": ZmqReceiver, "nixl": NixlReceiver}


@dataclass(frozen=True)
class Order:
    """What the sending process is to push; without a transport it ends."""

    transport: str = ""
    reservation: str = ""
    endpoint: dict[str, str] | None = None
    sources: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


def make_pool(device: str, num_blocks: int, block_bytes: int, seed: int | None) -> torch.Tensor:
    """`[num_blocks, block_bytes]` of random bytes, the same for a seed on the same kind of device; or of zeros."""
    shape = (num_blocks, block_bytes)
    if seed is None:
        pool = torch.zeros(shape, dtype=torch.uint8, device=device)
    else:
        generator = torch.Generator(device).manual_seed(seed)
        pool = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    settle(pool)
    return pool


def settle(pool: torch.Tensor) -> None:
    """Waits for what was written from here: a transport's streams do not."""
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)


def send_as_ordered(device: str, num_blocks: int, block_bytes: int, transports: list[str], orders: Connection) -> None:
    """The sending process: answers each order with the moment of its push, or with what failed."""

    async def serve() -> None:
        pool = DevicePool(make_pool(device, num_blocks, block_bytes, _SEED))
        failures: list[str] = []
        senders = {name: SENDERS[name](pool) for name in transports}
        for sender in senders.values():
            sender.start(lambda e: failures.append(e.cause) if isinstance(e, TransferFailed) else None)
        orders.send("ready")
        while (order := await asyncio.to_thread(orders.recv)).transport:
            pairs = zip(order.sources, order.slots, strict=True)
            copies = [BlockPush(index, source, slot) for index, (source, slot) in enumerate(pairs)]
            began = time.monotonic()
            senders[order.transport].push(order.reservation, order.endpoint or {}, copies)
            orders.send((began, list(failures)))
        for sender in senders.values():
            sender.close()

    asyncio.run(serve())


class Pair:
    """The receiving ends in this process, the sending ones in another."""

    def __init__(self, device: str, num_blocks: int, block_bytes: int, transports: list[str]) -> None:
        self._block_bytes = block_bytes
        self._source = make_pool(device, num_blocks, block_bytes, _SEED)
        self.target = make_pool(device, num_blocks, block_bytes, None)
        pool = DevicePool(self.target)
        self.receivers = {name: RECEIVERS[name](pool) for name in transports}
        self._landed: asyncio.Queue[Landed] = asyncio.Queue()
        self._random = np.random.default_rng(5)
        self._orders, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(
            target=send_as_ordered, args=(device, num_blocks, block_bytes, transports, theirs), daemon=True
        )
        self._process.start()
        self._num_pushes = 0

    async def start(self) -> None:
        """On the event loop's thread; returns when the other process is ready."""
        for receiver in self.receivers.values():
            receiver.start(self._take)
        assert await asyncio.to_thread(self._orders.recv) == "ready"

    def _take(self, event: ReceiverEvent) -> None:
        if isinstance(event, Landed):
            self._landed.put_nowait(event)

    async def push(self, transport: str, num_bytes: int) -> float:
        """Seconds of one push. Raises TimeoutError, and AssertionError where bytes differ."""
        count = num_bytes // self._block_bytes
        sources, slots = (tuple(self._random.permutation(len(self.target))[:count].tolist()) for _ in range(2))
        self._num_pushes += 1
        reservation, receiver = str(self._num_pushes), self.receivers[transport]
        receiver.admit(reservation, 0, slots)
        self._orders.send(Order(transport, reservation, receiver.endpoint, sources, slots))
        began, failures = await asyncio.to_thread(self._orders.recv)
        num_landed = 0
        async with asyncio.timeout(_PUSH_TIMEOUT_S):
            while num_landed < count:
                num_landed += len((await self._landed.get()).blocks)
        ended = time.monotonic()
        receiver.release(reservation)
        assert not failures, failures
        assert torch.equal(self.target[list(slots)], self._source[list(sources)]), "other bytes came than were sent"
        self.target[list(slots)] = 0
        settle(self.target)
        return float(ended - began)

    def close(self) -> None:
        self._orders.send(Order())
        self._process.join()
        for receiver in self.receivers.values():
            receiver.close()


def run(part: Part) -> None:
    """A row a transport and size."""
    if not has_nixl():
        part.recorder.note("NIXL is not installed.")
    asyncio.run(_measure(part, ["zmq", *(["nixl"] if has_nixl() else [])]))


async def _measure(part: Part, transports: list[str]) -> None:
    scale, floors = part.scale, part.known_floors
    block_bytes = block_bytes_of(part)
    device = str(part.device)
    pair = Pair(device, scale.transfer_pool_bytes // block_bytes, block_bytes, transports)
    await pair.start()
    host_rate = 1 / (1 / floors.to_host_rate + 1 / floors.to_device_rate)
    try:
        for size in scale.transfer_bytes:
            if not part.recorder.has_time(f"{size >> 20} MiB and more"):
                return
            taken: dict[str, list[float]] = {name: [] for name in transports}
            for repeat in range(scale.repeats + 1):
                for name in transports:
                    seconds = await pair.push(name, size)
                    if repeat:
                        taken[name].append(size // block_bytes * block_bytes / seconds)
            for name, rates in taken.items():
                part.recorder.row(
                    "Transfer",
                    transport=name,
                    MiB=size >> 20,
                    rate_GBps=figures([rate / 1e9 for rate in rates], 2),
                    of_the_copy=ratios(rates, [floors.copy_rate / 2] * len(rates), 3),
                    of_the_hosts_way=ratios(rates, [host_rate] * len(rates)),
                )
    finally:
        pair.close()


def block_bytes_of(part: Part) -> int:
    """A block of the model's, without loading it."""
    config = part.scale.config
    return int(
        config["num_hidden_layers"] * 2 * 16 * config["num_key_value_heads"] * part.scale.head_dim * part.dtype.itemsize
    )
