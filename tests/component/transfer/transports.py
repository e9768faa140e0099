"""The implementations that the conformance suite runs over, and pools with known content."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident

import numpy as np
import pytest
import torch

from kvrelay.curve import CurveKey, CurveKeys
from kvrelay.engine.run.block_copies import DevicePool
from kvrelay.handoff.transports.base import (
    BlockPush,
    Pushed,
    ReceiverEvent,
    SenderCounters,
    SenderDrained,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.nixl_agent import PACKAGES, NixlAgent, Region, TransportUnavailable
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.outbox import Copies
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy, PoolChecksums, PoolLike
from kvrelay.handoff.transports.receiver_thread import ReceiverThread
from kvrelay.handoff.transports.wire import Bytes, Indices, encode_header
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import SenderSettings, ZmqSender
from kvrelay.simulated.timed_transport import PacedSender
from tests.fakes.faulty_transport import BENIGN, Fault, Faults, FaultyReceiver, FaultySender, InnerSender, Point, Seeded

PIECE_BLOCKS = 16
_numbers = itertools.count(1)
_receivers: dict[str, MemoryReceiver] = {}


class MemoryReceiver(ReceiverThread):
    """Takes what a `MemorySender` delivers, on the event loop's thread."""

    name = "memory"

    def __init__(self, pool: Bytes, *, one_sided: bool = False) -> None:
        super().__init__("no thread", pool)
        self.is_one_sided = one_sided
        self._address = f"memory-{next(_numbers)}"
        _receivers[self._address] = self

    @property
    def endpoint(self) -> dict[str, str]:
        return {"memory": self._address}

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self._on_event = on_event

    def deliver(self, header: bytes, slots: Sequence[int], data: Bytes) -> None:
        if self.is_one_sided:
            self._pool.scatter(np.asarray(slots, np.int64), data)
        for event in self._take(header, None if self.is_one_sided else data.reshape(-1).data):
            self._on_event(event)

    def close(self) -> None:
        _receivers.pop(self._address, None)


class MemorySender:
    """Pieces for a receiver that is closed wait until they are aborted."""

    name = "memory"

    def __init__(self, pool: Bytes, *, checksums: PoolChecksums | None = None) -> None:
        self._pool = pool
        self._checksums = checksums
        self.counters = SenderCounters()
        self._queue: deque[tuple[str, str, Copies]] = deque()
        self._turn_is_due = False

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event

    def push(
        self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        """Delivers at the earliest in the loop's next turn."""
        assert part is None
        address = endpoint.get("memory", "")
        if not address:
            self._loop.call_soon(self._on_event, TransferFailed(reservation, "no endpoint of this transport"))
            return
        columns = Copies.of(copies, len(self._pool))
        for first in range(0, len(columns), PIECE_BLOCKS):
            self._queue.append((reservation, address, columns.take(slice(first, first + PIECE_BLOCKS))))
        self._plan_turn()

    def abort(self, reservation: str) -> None:
        self._queue = deque(item for item in self._queue if item[0] != reservation)
        self._loop.call_soon(self._on_event, SenderDrained(reservation))

    def close(self) -> None:
        self._queue.clear()

    def _plan_turn(self) -> None:
        if self._queue and not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        for number, (reservation, address, copies) in enumerate(self._queue):
            receiver = _receivers.get(address)
            if receiver is not None:
                del self._queue[number]
                self._deliver(receiver, reservation, copies)
                self._plan_turn()
                return

    def _deliver(self, receiver: MemoryReceiver, reservation: str, copies: Copies) -> None:
        data = np.take(self._pool, copies.sources, axis=0)
        checksums = None if self._checksums is None else self._checksums.of(copies.sources)
        header = encode_header(reservation, self._pool.shape[1], copies.indices, copies.slots, checksums)
        receiver.deliver(header, copies.slots.tolist(), data)
        self._on_event(Pushed(reservation, tuple(copies.indices.tolist()), data.nbytes))


DRAIN_TIMEOUT_S = 0.2
EMPTY = 0xEE
"""What a target pool holds where nothing was written."""


@dataclass(frozen=True)
class Transport:
    """How to make both ends over a pool."""

    name: str
    make_sender: Callable[[Bytes], TransferSender]
    make_receiver: Callable[[Bytes], TransferReceiver]
    one_sided: bool = False
    """Whether what is under way cannot be taken back."""
    why_not: str = ""
    """Why it cannot be tested here."""
    across_processes: bool = True
    gathers_all: bool = False
    """Whether every block is copied before it is sent, and may be given up as soon as that is done."""


def _why_no_nixl() -> str:
    try:
        NixlAgent(Region.of(np.zeros((2, 4096), np.uint8))).close()
    except TransportUnavailable as error:
        return f"NIXL does not work here: {error}"
    return ""


NO_NIXL = _why_no_nixl()


FLEET_KEY = CurveKeys(CurveKey.new())


class EnteredPool(DevicePool):
    """Refuses threads that have not entered it: they would work on a GPU only as long as that is the first one."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._entered: set[int] = set()
        super().__init__(pool)

    def enter_thread(self) -> None:
        super().enter_thread()
        self._entered.add(get_ident())

    def gather(self, blocks: Indices, out: Bytes, part: BlockPart | None = None) -> None:
        assert get_ident() in self._entered
        super().gather(blocks, out, part)

    def scatter(self, slots: Indices, rows: Bytes, part: BlockPart | None = None) -> None:
        assert get_ident() in self._entered
        super().scatter(slots, rows, part)


def staged(pool: Bytes) -> DevicePool:
    """The pool as if it lay in an accelerator's memory: no end reads or writes it in place."""
    torch.set_num_threads(1)  # copies by several threads, which spin, stand still on a busy machine
    return EnteredPool(torch.from_numpy(pool))


def zmq_sender(pool: PoolLike, *, checksum: bool = False, curve: CurveKeys | None = None) -> ZmqSender:
    """A sender whose aborts do not make a test wait."""
    return ZmqSender(
        pool,
        settings=SenderSettings(drain_timeout_s=DRAIN_TIMEOUT_S),
        checksums=PoolChecksums(pool) if checksum else None,
        curve=curve,
    )


def nixl(name: str, ucx_transports: str, *, checksum: bool = False) -> Transport:
    """NIXL over these transports of UCX; writes so small that a push takes several."""
    settings = NixlSettings(ucx_transports=ucx_transports, piece_bytes=1 << 20, piece_blocks=1024)
    return Transport(
        name,
        lambda pool: NixlSender(pool, settings=settings, checksums=PoolChecksums(pool) if checksum else None),
        lambda pool: NixlReceiver(pool, ucx_transports=ucx_transports),
        one_sided=True,
        why_not=NO_NIXL,
    )


REPORTED_ONCE = frozenset({(Point.DRAINED, Fault.DUPLICATE), (Point.LANDED, Fault.DUPLICATE)})


def faulty(inner: Transport, make_inner: InnerSender) -> Transport:
    """The other one, with everything late, in another order, and sent twice, by a seed; but nothing reported twice."""

    def faults() -> Faults:
        return Faults(Seeded(20, BENIGN, REPORTED_ONCE))

    return Transport(
        f"faulty-{inner.name}",
        lambda pool: FaultySender(pool, make_inner, faults()),
        lambda pool: FaultyReceiver(inner.make_receiver(pool), faults()),
        one_sided=inner.one_sided,
        why_not=inner.why_not,
        across_processes=False,
    )


def nixl_with_checksums(pool: PoolLike) -> NixlSender:
    """Over one pool, which the sender's thread enters for both."""
    return NixlSender(pool, checksums=PoolChecksums(pool))


def inner_zmq(pool: Bytes, checksums: PoolChecksums | None) -> TransferSender:
    return ZmqSender(pool, settings=SenderSettings(drain_timeout_s=DRAIN_TIMEOUT_S), checksums=checksums)


def inner_nixl(pool: Bytes, checksums: PoolChecksums | None) -> TransferSender:
    return NixlSender(pool, checksums=checksums)


def inner_memory(pool: Bytes, checksums: PoolChecksums | None) -> TransferSender:
    return MemorySender(pool, checksums=checksums)


MEMORY = Transport("memory", MemorySender, MemoryReceiver, across_processes=False)
MEMORY_ONE_SIDED = Transport(
    "memory-one-sided",
    MemorySender,
    lambda pool: MemoryReceiver(pool, one_sided=True),
    one_sided=True,
    across_processes=False,
)
ZMQ = Transport("zmq", zmq_sender, ZmqReceiver)
NIXL = nixl("nixl", "")

WRAPPED = {
    inner.name: (inner, make_inner)
    for inner, make_inner in (
        (MEMORY, inner_memory),
        (MEMORY_ONE_SIDED, inner_memory),
        (ZMQ, inner_zmq),
        (NIXL, inner_nixl),
    )
}
"""What the faulty transport wraps, and how the sender in it is made."""

TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport("zmq-local", zmq_sender, ZmqReceiver),
        Transport("zmq-tcp", zmq_sender, lambda pool: ZmqReceiver(pool, local=False)),
        Transport(
            "zmq-curve",
            lambda pool: zmq_sender(pool, curve=FLEET_KEY),
            lambda pool: ZmqReceiver(pool, curve=FLEET_KEY),
            across_processes=False,
        ),
        Transport("zmq-checksum", lambda pool: zmq_sender(pool, checksum=True), ZmqReceiver),
        Transport(
            "zmq-staged",
            lambda pool: zmq_sender(staged(pool)),
            lambda pool: ZmqReceiver(staged(pool)),
            gathers_all=True,
        ),
        Transport(
            "zmq-staged-checksum",
            lambda pool: zmq_sender(staged(pool), checksum=True),
            lambda pool: ZmqReceiver(staged(pool)),
            gathers_all=True,
        ),
        Transport("zmq-paced", lambda pool: PacedSender(zmq_sender(pool), 1e9, pool.shape[1], len(pool)), ZmqReceiver),
        NIXL,
        nixl("nixl-tcp", "tcp"),
        nixl("nixl-checksum", "", checksum=True),
        Transport(
            "nixl-staged-checksum",
            lambda pool: nixl_with_checksums(staged(pool)),
            lambda pool: NixlReceiver(staged(pool)),
            one_sided=True,
            why_not=NO_NIXL,
        ),
        *(faulty(inner, make_inner) for inner, make_inner in WRAPPED.values()),
    )
}


def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where it is not installed."""
    for package in PACKAGES:
        for module in (package, f"{package}._api"):
            monkeypatch.setitem(sys.modules, module, None)


def source_pool(num_blocks: int, block_bytes: int, seed: int = 0) -> Bytes:
    """A pool of random bytes, the same for the same arguments in every process."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def target_pool(num_blocks: int, block_bytes: int) -> Bytes:
    """A pool into which nothing was written."""
    return np.full((num_blocks, block_bytes), EMPTY, np.uint8)
