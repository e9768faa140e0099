"""Simpler caches than the radix tree, to measure the gain of each of its parts.

They report no events, so the fleet's prefix index stays empty and requests are routed by load alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv.cache import CacheEvent
from kvrelay.kv.errors import IntegrityError
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool


class NullCache:
    """Caches nothing: every prompt is computed completely."""

    num_cached = 0
    num_evictable = 0

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        return []

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        return 0

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        return list(blocks)

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        return list(blocks)

    def evict(self, num_blocks: int) -> list[int]:
        return []

    def demote(self, hashes: Sequence[BlockHash]) -> None:
        pass

    def remove(self, hashes: Sequence[BlockHash]) -> list[int]:
        return []

    def clear(self) -> list[int]:
        return []

    def drain_events(self) -> list[CacheEvent]:
        return []

    def check_integrity(self) -> None:
        pass  # there is nothing to recount


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A whole sequence in the table. Its key is its last hash; it is evictable while `num_pins` is 0."""

    hashes: list[BlockHash]
    blocks: list[int]
    num_pins: int = 0  # number of its blocks that are held


class TableCache:
    """A flat table of whole sequences, which shares no partial prefixes.

    A cached sequence is found only if all of it is a prefix of the new one, as in the next turn of a conversation.
    Two sequences with a common beginning keep a copy of it each. Evicts whole sequences, least recently used first, so
    `evict` may free more blocks than requested. A block belongs to one entry.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[BlockHash, CachedSequence] = {}
        self._idle: OrderedDict[BlockHash, CachedSequence] = OrderedDict()  # nothing held; by last use, oldest first
        self._entry_of: dict[int, CachedSequence] = {}
        self._num_evictable = 0
        pool.attach(self)

    @property
    def num_cached(self) -> int:
        """Blocks of all entries."""
        return len(self._entry_of)

    @property
    def num_evictable(self) -> int:
        """Blocks of the entries of which nothing is held."""
        return self._num_evictable

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest entry that is a prefix of the hashes; it counts as used now."""
        length = self.peek(hashes)
        if not length:
            return []
        return list(self._use(hashes[length - 1]).blocks)

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """That entry's length in blocks, or 0."""
        for length in range(len(hashes), 0, -1):
            if hashes[length - 1] in self._entries:
                return length
        return 0

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Adds a sequence, or lengthens the entry that its first blocks belong to. See `Cache.insert`."""
        self._check(hashes, blocks)
        if not hashes:
            return []
        if hashes[-1] in self._entries:
            return list(self._use(hashes[-1]).blocks)
        num_known = self.peek(hashes)
        entry = self._entry_of.get(blocks[0])
        if num_known and entry is not None and entry.hashes[-1] == hashes[num_known - 1]:
            self._lengthen(entry, hashes[num_known:], blocks[num_known:])
        else:
            self._lengthen(CachedSequence([], []), hashes, blocks)
        return list(blocks)

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Lengthens the entry that ends in `parent_hash`, or starts one at None. See `Cache.extend`."""
        if parent_hash is None:
            return self.insert(hashes, blocks)
        self._check(hashes, blocks)
        entry = self._entries.get(parent_hash)
        if entry is None or not hashes:
            return list(blocks)
        if hashes[-1] in self._entries:
            return self._entries[hashes[-1]].blocks[-len(blocks) :]
        self._lengthen(entry, hashes, blocks)
        return list(blocks)

    def demote(self, hashes: Sequence[BlockHash]) -> None:
        """Does nothing: whole sequences are evicted by last use."""

    def evict(self, num_blocks: int) -> list[int]:
        """Frees the least recently used entries of which nothing is held, until `num_blocks` blocks are free."""
        evicted = self.evict_blocks(num_blocks)
        self._pool.uncache(evicted)
        return evicted

    def evict_blocks(self, num_blocks: int) -> list[int]:
        """Called by the pool. Removes the least recently used entries without holds and returns their blocks."""
        forgotten: list[int] = []
        while self._idle and len(forgotten) < num_blocks:
            forgotten += self._forget(next(iter(self._idle.values())))
        return forgotten

    def remove(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Withdraws every entry with one of these in it. O(cached)."""
        doomed = set(hashes)
        entries = [entry for entry in self._entries.values() if not doomed.isdisjoint(entry.hashes)]
        return [block for entry in entries for block in self._withdraw(entry)]

    def clear(self) -> list[int]:
        """Removes all entries. Returns their blocks."""
        return [block for entry in list(self._entries.values()) for block in self._withdraw(entry)]

    def drain_events(self) -> list[CacheEvent]:
        """Returns no events: two entries may hold the same hash, which an index could not represent."""
        return []

    def pin(self, blocks: Sequence[int]) -> None:
        """Called by the pool when these blocks get their first hold."""
        for block in blocks:
            entry = self._entry_of[block]
            self._not_idle(entry)
            entry.num_pins += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """Called by the pool when blocks lost their last hold. An entry counts as used when its last hold ends."""
        for block in blocks:
            entry = self._entry_of[block]
            entry.num_pins -= 1
            if not entry.num_pins:
                self._num_evictable += len(entry.blocks)
                self._idle[entry.hashes[-1]] = entry

    def check_integrity(self) -> None:
        """Recounts the entries. O(pool). Raises IntegrityError."""
        pool = self._pool
        num_evictable = 0
        for key, entry in self._entries.items():
            num_held = sum(pool.is_held(block) for block in entry.blocks)
            if key != entry.hashes[-1] or len(entry.hashes) != len(entry.blocks) or num_held != entry.num_pins:
                raise IntegrityError(f"the entry of blocks {entry.blocks} contradicts itself or the pool")
            if any(self._entry_of.get(block) is not entry for block in entry.blocks):
                raise IntegrityError(f"blocks {entry.blocks} do not all lead to their entry")
            if (self._idle.get(key) is entry) != (num_held == 0):
                raise IntegrityError(f"the entry of blocks {entry.blocks} is idle or not, against its holds")
            num_evictable += 0 if num_held else len(entry.blocks)
        if num_evictable != self._num_evictable:
            raise IntegrityError(f"{num_evictable} blocks are evictable, counted as {self._num_evictable}")
        cached = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
        if cached != self._entry_of.keys() or len(cached) != sum(len(e.blocks) for e in self._entries.values()):
            raise IntegrityError("pool and table differ on which blocks are cached")

    def _check(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        if len(hashes) != len(blocks):
            raise ValueError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        self._pool.check_all_held(blocks)

    def _lengthen(self, entry: CachedSequence, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Adds held blocks to an entry's end; nothing where one of them belongs to an entry already."""
        if any(block in self._entry_of for block in blocks):
            return
        if entry.hashes:
            self._not_idle(entry)
            del self._entries[entry.hashes[-1]]
        entry.hashes += hashes
        entry.blocks += blocks
        entry.num_pins += len(blocks)
        self._entries[hashes[-1]] = entry
        self._entry_of.update(dict.fromkeys(blocks, entry))
        self._pool.cache(blocks)

    def _withdraw(self, entry: CachedSequence) -> list[int]:
        self._pool.uncache(self._forget(entry))
        return entry.blocks

    def _forget(self, entry: CachedSequence) -> list[int]:
        self._not_idle(entry)
        del self._entries[entry.hashes[-1]]
        for block in entry.blocks:
            del self._entry_of[block]
        return entry.blocks

    def _use(self, key: BlockHash) -> CachedSequence:
        """The entry, which counts as used now."""
        if key in self._idle:
            self._idle.move_to_end(key)
        return self._entries[key]

    def _not_idle(self, entry: CachedSequence) -> None:
        """Takes an entry off the evictable ones, if it is there."""
        if self._idle.pop(entry.hashes[-1], None) is not None:
            self._num_evictable -= len(entry.blocks)
