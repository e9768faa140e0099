"""A transport inside one process, without threads: a piece of a push in each turn of the event loop, in order.

Deterministic, so that a schedule of faults over it gives the same run again. One-sided, or copying on the receiving
side as the book there allows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvrelay.handoff.transports.base import (
    BlockPush,
    Pushed,
    ReceiverEvent,
    SenderCounters,
    SenderDrained,
    SenderEvent,
    TransferFailed,
)
from kvrelay.handoff.transports.outbox import Copies
from kvrelay.handoff.transports.pool_memory import PartCopy, PoolChecksums
from kvrelay.handoff.transports.receiver_thread import ReceiverThread
from kvrelay.handoff.transports.wire import Bytes, encode_header

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
