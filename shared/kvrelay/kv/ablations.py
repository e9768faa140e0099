"""Caches with less than the radix tree, to measure what its parts are worth.

The fleet's prefix index has nothing of a worker that uses one, so requests are routed to it by load alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache


class NullCache(PrefixCache):
    """Caches nothing: every prompt is computed completely."""

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        return list(blocks)

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        return list(blocks)


class TableCache(PrefixCache):
    """Finds complete sequences only, as a table without a tree would, to measure what shared prefixes are worth.

    A cached sequence is found if all of it is a prefix of the new one, as in the next turn of a conversation. A common
    beginning is stored once, so this table has more room than one that keeps a copy for each sequence.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._ends: set[BlockHash] = set()  # last hashes of sequences; of evicted ones too, until the next sweep
        self._max_ends = pool.num_blocks

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """The length in blocks of the longest cached sequence that is a prefix of the hashes. O(len(hashes))."""
        length = self._num_present(hashes)
        while length and hashes[length - 1] not in self._ends:
            length -= 1
        return length

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """As in a tree; the longest sequence that this one begins with becomes this one."""
        num_known = self.peek(hashes)
        stored = super().insert(hashes, blocks)
        self._move_end(hashes[num_known - 1] if num_known else None, hashes)
        return stored

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """As in a tree; the sequence that ends in `parent_hash` becomes longer."""
        stored = super().extend(parent_hash, hashes, blocks)
        self._move_end(parent_hash, hashes)
        return stored

    def _move_end(self, old: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        if not hashes or hashes[-1] not in self._block_of:
            return
        if old is not None:
            self._ends.discard(old)
        self._ends.add(hashes[-1])
        if len(self._ends) > self._max_ends:
            self._ends = {end for end in self._ends if end in self._block_of}
