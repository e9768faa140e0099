"""What a worker has to tell the index: a state machine, no I/O.

States of the range that Redis has of this worker:

1. CLOSED   none: it was never opened, or it cannot be right any more. The next call opens a fresh slot.
2. OPEN     it gets batches, one at a time, each numbered. One that is not answered is repeated as it was.
3. REFUSED  a later start of this worker publishes; after a while it is tried again.

`mirror` is what the cache holds by its own events, in an order in which every block comes after its parent. A range is
replaced by opening a fresh slot and publishing the mirror: so whatever was lost, here or in Redis, heals the same way.
Batches keep the order of events and are cut anywhere: the range is closed under prefixes after each of them.
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
"""Operations that may wait for Redis, beyond those of a replacement. With more the range is replaced instead."""


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Ask for a fresh slot."""

    claim: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Send a batch; `operations` is empty to renew the lease."""

    slot: int
    claim: str
    seq: int
    operations: bytes
    event: bytes


Call = OpenSlot | Apply


class RangeState(StrEnum):
    """See the module's text."""

    CLOSED = "closed"
    OPEN = "open"
    REFUSED = "refused"


@dataclass(slots=True)
class PublicationTotals:
    """Since the start; `blocks` are operations that Redis confirmed."""

    batches: int = 0
    blocks: int = 0
    gaps: int = 0
    """Redis had lost batches, or the whole range."""
    replacements: int = 0
    """Times that a range was published anew; the first time is none."""
    dropped: int = 0
    """Operations thrown away because too many waited."""


class Publication:
    """One worker's range. `incarnation` sorts after those of the worker's earlier starts."""

    def __init__(self, incarnation: str, *, max_pending_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self.state = RangeState.CLOSED
        self.totals = PublicationTotals()
        self.mirror: dict[BlockHash, None] = {}
        self.slot = -1
        self.seq = 0
        self._incarnation = incarnation
        self._generation = 0
        self._max_pending = max_pending_blocks
        self._allowance = 0  # operations of the replacement that still wait
        self._pending: deque[Run] = deque()
        self.num_pending = 0
        self._in_flight: Apply | None = None
        self._in_flight_blocks = 0

    @property
    def claim(self) -> str:
        """Names this start of the worker, and how often it has replaced its range."""
        return f"{self._incarnation}:{self._generation:08d}"

    @property
    def is_settled(self) -> bool:
        """Redis has confirmed everything that the cache said."""
        return self.state is RangeState.OPEN and not self.num_pending and self._in_flight is None

    def absorb(self, events: Iterable[CacheEvent]) -> None:
        """Takes over what the cache said, in its order."""
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
        """What to ask of Redis now; None when there is nothing. After each call comes an answer, or `no_answer`."""
        if self.state is RangeState.REFUSED:
            return None
        if self.state is RangeState.CLOSED:
            return OpenSlot(self.claim)
        if self._in_flight is None and self.num_pending:
            self._in_flight = self._cut_batch()
        if self._in_flight is not None:
            return self._in_flight
        return Apply(self.slot, self.claim, self.seq, b"", b"") if renew else None

    def opened(self, slot: int) -> None:
        """A fresh slot was given: everything that is cached goes there."""
        if self._generation:
            self.totals.replacements += 1
        self.state, self.slot, self.seq = RangeState.OPEN, slot, 0
        everything = list(self.mirror)
        self._allowance = len(everything)
        for start in range(0, len(everything), MAX_BATCH_BLOCKS):
            self._queue(STORED, everything[start : start + MAX_BATCH_BLOCKS])

    def refused(self) -> None:
        """A later start of this worker has a range."""
        self._close()
        self.state = RangeState.REFUSED

    def try_again(self) -> None:
        """Enough time has passed since the refusal."""
        if self.state is RangeState.REFUSED:
            self.state = RangeState.CLOSED

    def applied(self) -> None:
        """Redis has the batch in flight."""
        if self._in_flight is None:
            return
        self.seq = self._in_flight.seq
        self.totals.batches += 1
        self.totals.blocks += self._in_flight_blocks
        self._allowance = max(0, self._allowance - self._in_flight_blocks)
        self._in_flight = None

    def lost(self) -> None:
        """GAP or LOST: what Redis has of this worker, if anything, is not what was sent."""
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
        batch = Batch(self.slot, self.claim, self.seq + 1, operations)
        return Apply(self.slot, self.claim, self.seq + 1, operations, encode_batch(batch))
