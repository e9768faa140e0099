"""State machine that decides what a worker publishes to the index. No I/O.

States of the range that Redis has of this worker:

1. CLOSED   Never opened, or no longer correct. The next call opens a new slot.
2. OPEN     Receives numbered batches one at a time. An unanswered batch is repeated unchanged.
3. REFUSED  A later incarnation of this worker publishes. Retried after a pause.

`mirror` contains the cached blocks according to the cache's events, parents first. A range is replaced by opening a new
slot and publishing the mirror, which repairs any loss here or in Redis. Batches keep the order of events and may be cut
anywhere, so the range is closed under prefixes after each batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.fleet.index.layout import (
    MAX_BATCH_BLOCKS,
    REMOVED,
    STORED,
    Batch,
    Run,
    encode_batch,
    encode_operations,
)
from kvrelay.kv.cache import CacheEvent, Stored
from kvrelay.kv.hashing import BlockHash

MAX_PENDING_BLOCKS = 100_000
"""Maximum operations waiting for Redis beyond those of a replacement. With more, the range is replaced."""


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Open a new slot."""

    range_id: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a batch; empty `operations` renew the lease."""

    slot: int
    range_id: str
    seq: int
    operations: bytes
    event: bytes


Call = OpenSlot | Apply


class RangeState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    REFUSED = "refused"


@dataclass(slots=True)
class PublicationTotals:
    """Counters since the start. `blocks` counts operations confirmed by Redis."""

    batches: int = 0
    blocks: int = 0
    gaps: int = 0
    """Times that Redis had lost batches or the range."""
    replacements: int = 0
    """Times that the range was republished, without the first publication."""
    dropped: int = 0
    """Operations dropped because too many waited."""


class Publication:
    """Publishes one worker's range. `incarnation` must sort after the worker's earlier ones."""

    def __init__(self, incarnation: str, *, max_pending_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self.state = RangeState.CLOSED
        self.totals = PublicationTotals()
        self.mirror: dict[BlockHash, None] = {}
        self.slot = -1
        self.seq = 0
        self._incarnation = incarnation
        self._generation = 0
        self._max_pending = max_pending_blocks
        self._allowance = 0  # operations of the complete mirror still pending; they do not count against the limit
        self._pending: deque[Run] = deque()
        self.num_pending = 0
        self._in_flight: Apply | None = None
        self._in_flight_blocks = 0

    @property
    def range_id(self) -> str:
        """Incarnation and generation: identifies this range in Redis."""
        return f"{self._incarnation}:{self._generation:08d}"

    @property
    def is_settled(self) -> bool:
        """Returns whether Redis confirmed all events of the cache."""
        return self.state is RangeState.OPEN and not self.num_pending and self._in_flight is None

    def absorb(self, events: Iterable[CacheEvent]) -> None:
        """Queues cache events in their order."""
        mirror = self.mirror
        for event in events:
            if isinstance(event, Stored):
                operation = STORED
                mirror.update(dict.fromkeys(event.hashes))
            else:
                operation = REMOVED
                for block_hash in event.hashes:
                    mirror.pop(block_hash, None)
            if self.state is RangeState.OPEN:
                self._queue(operation, event.hashes)
        if self.num_pending > self._max_pending + self._allowance:
            self.totals.dropped += self.num_pending
            self._close()

    def next_call(self, *, renew: bool = False) -> Call | None:
        """The next call to Redis, or None. Each call must be followed by its answer or `no_answer`."""
        if self.state is RangeState.REFUSED:
            return None
        if self.state is RangeState.CLOSED:
            return OpenSlot(self.range_id)
        if self._in_flight is None and self.num_pending:
            self._in_flight = self._cut_batch()
        if self._in_flight is not None:
            return self._in_flight
        return Apply(self.slot, self.range_id, self.seq, b"", b"") if renew else None

    def opened(self, slot: int) -> None:
        """A new slot was assigned: the complete mirror is published to it."""
        if self._generation:
            self.totals.replacements += 1
        self.state, self.slot, self.seq = RangeState.OPEN, slot, 0
        everything = list(self.mirror)
        self._allowance = len(everything)
        for start in range(0, len(everything), MAX_BATCH_BLOCKS):
            self._queue(STORED, everything[start : start + MAX_BATCH_BLOCKS])

    def refused(self) -> None:
        """A later incarnation of this worker has a range."""
        self._close()
        self.state = RangeState.REFUSED

    def try_again(self) -> None:
        """Leaves REFUSED after the pause."""
        if self.state is RangeState.REFUSED:
            self.state = RangeState.CLOSED

    def applied(self) -> None:
        """Redis confirmed the batch in flight."""
        if self._in_flight is None:
            return
        self.seq = self._in_flight.seq
        self.totals.batches += 1
        self.totals.blocks += self._in_flight_blocks
        self._allowance = max(0, self._allowance - self._in_flight_blocks)
        self._in_flight = None

    def lost(self) -> None:
        """GAP or LOST: Redis' data of this worker is incomplete, so the range is replaced."""
        self.totals.gaps += 1
        self._close()

    def _close(self) -> None:
        self._generation += 1
        self.state = RangeState.CLOSED
        self.slot = -1
        self._pending.clear()
        self.num_pending = self._allowance = 0
        self._in_flight = None

    def _queue(self, operation: int, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._pending.append((operation, hashes))
            self.num_pending += len(hashes)

    def _cut_batch(self) -> Apply:
        runs: list[Run] = []
        room = MAX_BATCH_BLOCKS
        while room and self._pending:
            operation, hashes = self._pending.popleft()
            if len(hashes) > room:
                self._pending.appendleft((operation, hashes[room:]))
                hashes = hashes[:room]
            runs.append((operation, hashes))
            room -= len(hashes)
        self._in_flight_blocks = MAX_BATCH_BLOCKS - room
        self.num_pending -= self._in_flight_blocks
        operations = encode_operations(runs)
        batch = Batch(self.slot, self.range_id, self.seq + 1, operations)
        return Apply(self.slot, self.range_id, self.seq + 1, operations, encode_batch(batch))
