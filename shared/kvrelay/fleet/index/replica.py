"""A router's copy of the index: a dict of block hash to the set of slots that hold it, and lookups in microseconds.

A snapshot is read in pieces while workers go on, so it is of no single moment. It becomes exact by replay: the ranges
and the stream's id are taken first, in one call, then the pieces are read, then every event since that id is applied in
order. Whatever a piece saw too early or too late, the last event about a block and a slot decides; what no event
touched was the same all the time. Each range's batches are numbered, so a lost one is seen as a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.fleet.index.layout import STORED, Batch, IndexEvent, Opened, Retired, decode_operations, decode_slots
from kvrelay.kv.hashing import BlockHash

Ranges = Mapping[int, tuple[str, str, int]]
"""Slot to (claim, worker id, sequence number)."""

MAX_DECODED = 4096
CLEARED_AT_ONCE = 1000
"""Blocks of ended ranges that one call forgets: what follows a worker's death must hold up no stream."""


class ReplicaOutOfStep(Exception):
    """A batch is missing: only a new snapshot helps."""


@dataclass(slots=True)
class _Range:
    claim: str
    worker_id: str
    seq: int
    hashes: set[BlockHash] = field(default_factory=set)


class IndexReplica:
    """All ranges of one model. Not thread-safe; a call works on a bounded piece."""

    def __init__(self, ranges: Ranges) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._ranges = {slot: _Range(*description) for slot, description in ranges.items()}
        self._workers_of: dict[int, tuple[str, ...]] = {}  # decoded sets of slots
        self._ended: dict[int, set[BlockHash]] = {}  # slot to what is still to be forgotten of its last range
        self._live = -1  # all bits but those of `_ended`

    @property
    def num_blocks(self) -> int:
        """Distinct blocks, with those of ended ranges that `clear_some` has still to forget."""
        return len(self._holders)

    @property
    def num_held(self) -> int:
        """Blocks, each counted for every range that holds it."""
        return sum(len(each.hashes) for each in self._ranges.values())

    @property
    def ranges(self) -> dict[int, tuple[str, str, int]]:
        """To be held against what Redis says."""
        return {slot: (each.claim, each.worker_id, each.seq) for slot, each in self._ranges.items()}

    def load(self, piece: bytes) -> None:
        """A piece of the snapshot, as snapshot.lua packs it."""
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
        """The stream's next event. One that is known already changes nothing. Raises ReplicaOutOfStep."""
        match event:
            case Batch():
                self._apply_batch(event)
            case Opened(slot=slot, claim=claim, worker_id=worker_id):
                known = self._ranges.get(slot)
                if known is None or known.claim != claim:
                    self._end(slot)
                    while slot in self._ended:  # hardly ever: a slot is given out again when all is swept
                        self._clear(slot)
                    self._ranges[slot] = _Range(claim, worker_id, 0)
                    self._workers_of.clear()
            case Retired(slot=slot, claim=claim):
                known = self._ranges.get(slot)
                if known is not None and known.claim == claim:
                    self._end(slot)

    def clear_some(self) -> bool:
        """Forgets a piece of the ranges that ended; whether any is left. Lookups do not see them any more."""
        if self._ended:
            self._clear(next(iter(self._ended)))
        return bool(self._ended)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For a chain: worker id to the number of leading blocks that it holds; O(log n) for each end of a prefix.

        Gallops to where nobody holds anything, then bisects every stretch at whose ends the holders differ. Needs each
        range to be closed under prefixes, as caches are that evict leaf first.
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
        """Finds where holders end between two places that differ."""
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
        if known is None or known.claim != batch.claim or batch.seq <= known.seq:
            return  # of a range that has ended since, or in the snapshot's ranges already
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
        """A range counts no more; `_clear` forgets its blocks."""
        known = self._ranges.pop(slot, None)
        if known is not None:
            self._workers_of.clear()
            if known.hashes:
                self._ended[slot] = known.hashes
                self._live &= ~(1 << slot)

    def _clear(self, slot: int) -> None:
        """Forgets some blocks of a range that ended."""
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
    """The positions of the bits that are set."""
    found = []
    while slots:
        lowest = slots & -slots
        found.append(lowest.bit_length() - 1)
        slots ^= lowest
    return found
