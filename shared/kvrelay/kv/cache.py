"""The interface of prefix caches, the events that report their changes, and errors of block bookkeeping.

An operation that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.kv.hashing import BlockHash


class BlockError(Exception):
    """An operation that the state of its blocks does not allow: holding a free one, releasing what isn't held."""


class OutOfBlocks(BlockError):
    """An allocation asked for more than the free and the evictable blocks together."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


class OutOfSlots(BlockError):
    """The swap space has fewer free slots than a copy takes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} slots needed, {free} free")
        self.needed = needed
        self.free = free


class IntegrityError(AssertionError):
    """The bookkeeping contradicts itself: a defect in this package, never in its caller."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain joined the cache: hashes[0] follows `parent_hash` (None: it is a first block), and so on."""

    parent_hash: BlockHash | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These left the cache, every block before its parent."""

    hashes: tuple[BlockHash, ...]


CacheEvent = Stored | Removed


class Cache(Protocol):
    """Remembers which blocks hold which prefix. Full blocks are named, and first parts of blocks if nothing follows
    them."""

    @property
    def num_cached(self) -> int:
        """Blocks in the cache, held or not."""
        ...

    @property
    def num_evictable(self) -> int:
        """Blocks that repeated eviction can free."""
        ...

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix, which counts as used now.

        No hold is taken: hold them before the next allocation, or it may evict them.
        """
        ...

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """The length in blocks of what `match` would return, without using it."""
        ...

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Publishes a chain from its first block on; hashes[i] names the content of blocks[i], computed and complete.

        Returns the cached block for each hash: the caller's own, or one that was there before. Then the caller's is a
        duplicate which the cache does not know; it may go on using it, or hold the cached one and release its own.
        Raises BlockError if a block is not held, or is cached under another hash.
        """
        ...

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Publishes the blocks that follow `parent_hash` (None: the chain starts here); costs nothing for the rest.

        Returns as `insert` does. If the parent is not cached any more, nothing is inserted and `blocks` is returned.
        """
        ...

    def evict(self, num_blocks: int) -> list[int]:
        """Frees the `num_blocks` least recently used leaves, one after the other, or all there are; returns them."""
        ...

    def demote(self, hashes: Sequence[BlockHash]) -> None:
        """Moves cached blocks that are not held before all others in the order of eviction. Ignores the rest.

        Each block stands behind its parent, and all blocks that follow one of them are among them. O(their number).
        """
        ...

    def remove(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Removes these blocks and all that follow them from the cache and returns them. Holds stay. O(cached)."""
        ...

    def clear(self) -> list[int]:
        """Removes all blocks from the cache, as `remove` does."""
        ...

    def drain_events(self) -> list[CacheEvent]:
        """Returns the changes since the last call, in order."""
        ...

    def check_integrity(self) -> None:
        """Recounts everything from first principles. O(pool). Raises IntegrityError."""
        ...


class NullCache:
    """Caches nothing: every prompt is computed completely, and requests are routed by load alone."""

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
