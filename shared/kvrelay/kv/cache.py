"""Changes of a prefix cache, and errors of block bookkeeping. An operation that raises has changed nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.kv.hashing import BlockHash


class BlockError(Exception):
    """An operation that the state of its blocks does not allow: holding a free one, releasing what isn't held."""


class OutOfBlocks(BlockError):
    """An allocation asked for more than the free and the evictable blocks together."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


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
