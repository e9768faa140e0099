"""A router's copy of the index: a dict of block hash to the set of slots that hold it, with lookups in microseconds.

A snapshot is read in pieces while workers publish, so it is not atomic. Replay makes it exact: the ranges and the
stream id are read first, atomically, then the pieces, then every event since that id is applied in order. For each
block and slot the last event decides, and a block without events did not change. Batch numbers reveal a lost batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.fleet.index.layout import (
    STORED,
    Batch,
    IndexEvent,
    RangeOpened,
    RangeRetired,
    decode_operations,
    decode_slots,
)
from kvrelay.kv.hashing import BlockHash

Ranges = Mapping[int, tuple[str, str, int]]
"""Slot to (owner, worker id, sequence number)."""

MAX_DECODED = 4096
CLEARED_AT_ONCE = 1000
"""Blocks of ended ranges dropped per call, so that a worker's death delays no stream."""


class ReplicaOutOfStep(Exception):
    """A batch is missing. Load a new snapshot."""


@dataclass(slots=True)
class _Range:
    range_id: str
    worker_id: str
    seq: int
    hashes: set[BlockHash] = field(default_factory=set)


class IndexReplica:
    """All ranges of one model. Not thread-safe; each call does bounded work."""

    def __init__(self, ranges: Ranges) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._ranges = {slot: _Range(*description) for slot, description in ranges.items()}
        self._workers_of: dict[int, tuple[str, ...]] = {}  # decoded sets of slots
        self._ended: dict[int, set[BlockHash]] = {}  # slot to the blocks of its last range that are not dropped yet
        self._live = -1  # all bits except those of `_ended`

    @property
    def num_blocks(self) -> int:
        """Distinct blocks, including those of ended ranges until `clear_some` drops them."""
        return len(self._holders)

    @property
    def num_held(self) -> int:
        """Blocks counted once per range that holds them."""
        return sum(len(each.hashes) for each in self._ranges.values())

    @property
    def ranges(self) -> dict[int, tuple[str, str, int]]:
        """Ranges for comparison with Redis."""
        return {slot: (each.range_id, each.worker_id, each.seq) for slot, each in self._ranges.items()}

    def load(self, piece: bytes) -> None:
        """Adds a piece of a snapshot."""
        holders, ranges = self._holders, self._ranges
        live = 0
        for slot in ranges:
            live |= 1 << slot
        position, end = 0, len(piece)
        while position < end:
            block_hash = piece[position : position + 16]
            length = piece[position + 16]
            position += 17 + length
            slots = decode_slots(piece[position - length : position]) & live
            if slots:
                holders[block_hash] = slots
                for slot in _bits(slots):
                    ranges[slot].hashes.add(block_hash)

    def apply(self, event: IndexEvent) -> None:
        """Applies the next stream event. A repeated event has no effect. Raises ReplicaOutOfStep."""
        match event:
            case Batch():
                self._apply_batch(event)
            case RangeOpened(slot=slot, range_id=range_id, worker_id=worker_id):
                known = self._ranges.get(slot)
                if known is None or known.range_id != range_id:
                    self._end(slot)
                    while slot in self._ended:  # rare: a slot is reused only after it was swept
                        self._clear(slot)
                    self._ranges[slot] = _Range(range_id, worker_id, 0)
                    self._workers_of.clear()
            case RangeRetired(slot=slot, range_id=range_id):
                known = self._ranges.get(slot)
                if known is not None and known.range_id == range_id:
                    self._end(slot)

    def clear_some(self) -> bool:
        """Drops some blocks of ended ranges, which lookups already ignore. Returns whether any are left."""
        if self._ended:
            self._clear(next(iter(self._ended)))
        return bool(self._ended)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Worker id to the number of leading blocks of the chain that it holds; O(log n) per end of a prefix.

        Gallops to the first block without a holder, then bisects every interval whose ends have different holders.
        Each range must be closed under prefixes, which holds for caches that evict leaves first.
        """
        held: dict[str, int] = {}
        get, live = self._holders.get, self._live
        last = len(hashes) - 1
        if last < 0:
            return held
        low, step = 0, 1
        at_low = get(hashes[0], 0) & live
        while at_low and low < last:
            high = low + step
            if high > last:
                high = last
            at_high = get(hashes[high], 0) & live
            if at_high != at_low:
                self._narrow(hashes, low, high, at_low, at_high, held)
            low, at_low = high, at_high
            step += step
        if at_low:
            held.update(dict.fromkeys(self._workers(at_low), last + 1))
        return held

    def _narrow(
        self, hashes: Sequence[BlockHash], low: int, high: int, at_low: int, at_high: int, held: dict[str, int]
    ) -> None:
        """Finds the ends of holders between two positions that differ."""
        get, live = self._holders.get, self._live
        while high - low > 1:
            middle = (low + high) >> 1
            at_middle = get(hashes[middle], 0) & live
            if at_middle == at_low:
                low = middle
            elif at_middle == at_high:
                high = middle
            else:
                self._narrow(hashes, low, middle, at_low, at_middle, held)
                low, at_low = middle, at_middle
        held.update(dict.fromkeys(self._workers(at_low & ~at_high), low + 1))

    def _workers(self, slots: int) -> tuple[str, ...]:
        workers = self._workers_of.get(slots)
        if workers is None:
            if len(self._workers_of) >= MAX_DECODED:
                self._workers_of.clear()
            workers = tuple(self._ranges[slot].worker_id for slot in _bits(slots))
            self._workers_of[slots] = workers
        return workers

    def _apply_batch(self, batch: Batch) -> None:
        known = self._ranges.get(batch.slot)
        if known is None or known.range_id != batch.range_id or batch.seq <= known.seq:
            return  # the range has ended, or the snapshot already contains the batch
        if batch.seq != known.seq + 1:
            raise ReplicaOutOfStep(f"slot {batch.slot}: batch {batch.seq} came after {known.seq}")
        known.seq = batch.seq
        bit = 1 << batch.slot
        holders, own = self._holders, known.hashes
        for operation, hashes in decode_operations(batch.operations):
            if operation == STORED:
                for block_hash in hashes:
                    holders[block_hash] = holders.get(block_hash, 0) | bit
                own.update(hashes)
            else:
                self._drop(hashes, bit)
                own.difference_update(hashes)

    def _end(self, slot: int) -> None:
        """Removes a range from lookups; `_clear` drops its blocks."""
        known = self._ranges.pop(slot, None)
        if known is not None:
            self._workers_of.clear()
            if known.hashes:
                self._ended[slot] = known.hashes
                self._live &= ~(1 << slot)

    def _clear(self, slot: int) -> None:
        """Drops some blocks of an ended range."""
        left = self._ended[slot]
        self._drop([left.pop() for _ in range(min(len(left), CLEARED_AT_ONCE))], 1 << slot)
        if not left:
            del self._ended[slot]
            self._live |= 1 << slot

    def _drop(self, hashes: Iterable[BlockHash], bit: int) -> None:
        holders = self._holders
        for block_hash in hashes:
            left = holders.get(block_hash, 0) & ~bit
            if left:
                holders[block_hash] = left
            else:
                holders.pop(block_hash, None)


def _bits(slots: int) -> list[int]:
    """Positions of the set bits."""
    found = []
    while slots:
        lowest = slots & -slots
        found.append(lowest.bit_length() - 1)
        slots ^= lowest
    return found
