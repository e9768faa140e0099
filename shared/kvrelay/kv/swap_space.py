"""The host swap space: which slots of the host's buffer hold which blocks (Kwon et al., SOSP 2023, section 4.5).

A slot has the size of a block. A full block is known by its hash, as in the prefix cache: sequences that share a prefix
share its slots, and it is copied out once. A part-filled block has no hash, and its slot one holder. Bookkeeping alone:
the engine copies the bytes, all of a step's copies out before its copies in. So a slot that a planned step reads must
stay held until that step has landed: a copy out of the same step would overwrite it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv.errors import BlockError, IntegrityError, OutOfSlots
from kvrelay.kv.free_runs import FreeRuns
from kvrelay.kv.hashing import BlockHash

SWAP_PART = 4
"""The swap space is the pool's size divided by this, unless it is configured."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Where some blocks lie: `slots[i]` is the i-th one's. `new`: the indices of those that are to be copied there."""

    slots: tuple[int, ...]
    new: tuple[int, ...]


class SwapSpace:
    """`num_slots` slots, all free at first. Every operation checks before it changes anything."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"no swap space of {num_slots} slots")
        self.num_slots = num_slots
        self._free_runs = FreeRuns(num_slots)
        self._num_holders = [0] * num_slots
        self._hash: list[BlockHash | None] = [None] * num_slots
        self._slot_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """The number of slots without a hold."""
        return self._free_runs.num_free

    @property
    def num_used(self) -> int:
        """The number of slots with a hold."""
        return self.num_slots - self._free_runs.num_free

    def num_new(self, hashes: Sequence[BlockHash | None]) -> int:
        """Slots that `store` would take: those of the blocks that are not here yet."""
        return sum(block_hash is None or block_hash not in self._slot_of for block_hash in hashes)

    def store(self, hashes: Sequence[BlockHash | None]) -> StoredBlocks:
        """Holds a slot for each block, in the order of a sequence's table; None: a block that is not full.

        The hashes differ from each other, as those of a chain do. Raises OutOfSlots.
        """
        new = [i for i, block_hash in enumerate(hashes) if block_hash is None or block_hash not in self._slot_of]
        if len(new) > self.num_free:
            raise OutOfSlots(len(new), self.num_free)
        fresh = iter(self._free_runs.take(len(new)))
        is_new = set(new)
        slots = []
        for index, block_hash in enumerate(hashes):
            if index in is_new or block_hash is None:
                slot = next(fresh)
                self._hash[slot] = block_hash
                if block_hash is not None:
                    self._slot_of[block_hash] = slot
            else:
                slot = self._slot_of[block_hash]
            self._num_holders[slot] += 1
            slots.append(slot)
        return StoredBlocks(tuple(slots), tuple(new))

    def release(self, slots: Sequence[int]) -> None:
        """Drops one hold of each slot; the last one frees it. Raises BlockError for a slot without a hold."""
        if len(set(slots)) != len(slots):
            raise BlockError("a slot is named twice in one operation")
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._num_holders[slot]:
                raise BlockError(f"slot {slot} is not held")
        freed = []
        for slot in slots:
            self._num_holders[slot] -= 1
            if not self._num_holders[slot]:
                freed.append(slot)
                if (block_hash := self._hash[slot]) is not None:
                    del self._slot_of[block_hash]
                    self._hash[slot] = None
        self._free_runs.give_back(freed)

    def num_released_by(self, slots: Sequence[int], keep: Sequence[BlockHash | None] = ()) -> int:
        """Slots that `release` would free, less those that hold one of the blocks in `keep`."""
        kept = {block_hash for block_hash in keep if block_hash is not None}
        return sum(self._num_holders[slot] == 1 and self._hash[slot] not in kept for slot in slots)

    def check_integrity(self) -> None:
        """Recounts holders, hashes and free slots. O(num_slots). Raises IntegrityError."""
        free = self._free_runs.check_integrity()
        for slot, num_holders in enumerate(self._num_holders):
            if num_holders < 0 or (num_holders == 0) != (slot in free):
                raise IntegrityError(f"slot {slot} has {num_holders} holders, the free runs say otherwise")
            block_hash = self._hash[slot]
            if block_hash is not None and (not num_holders or self._slot_of.get(block_hash) != slot):
                raise IntegrityError(f"slot {slot}: its hash leads elsewhere")
            if block_hash is None and num_holders > 1:
                raise IntegrityError(f"slot {slot}: a part-filled block has {num_holders} holders")
        if len(self._slot_of) != sum(block_hash is not None for block_hash in self._hash):
            raise IntegrityError("hashes lead to slots that do not have them")
