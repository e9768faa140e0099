"""The cache of a worker without a prefix cache. It reports no events, so requests are routed by load alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv.cache import CacheEvent
from kvrelay.kv.hashing import BlockHash


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
