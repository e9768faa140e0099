"""Blocks for sequences: admission with the cached prefix, growth, publication, release. One pool, shared with the
cache."""

from __future__ import annotations

from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.sequence import Sequence


class BlockManager:
    """Gives a sequence the blocks of its whole prompt at admission, and one at a time from then on."""

    def __init__(self, pool: BlockPool, cache: Cache) -> None:
        self.pool = pool
        self.cache = cache

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute (logits need one)."""
        return self.cache.match(sequence.block_hashes(self._num_reusable(sequence)))

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """How many blocks `cached_prefix` would find; does not count as a use."""
        return self.cache.peek(sequence.block_hashes(self._num_reusable(sequence)))

    def _num_reusable(self, sequence: Sequence) -> int:
        if sequence.sampling.prompt_logprobs is not None:
            return 0  # every position's logits are wanted
        return (sequence.num_tokens - 1) // self.pool.block_size

    def admit(self, sequence: Sequence, owner: Owner) -> bool:
        """Gives a sequence blocks for all its tokens; what the cache holds counts as computed. All or nothing."""
        cached = self.cached_prefix(sequence)
        self.pool.hold(cached, owner)
        num_missing = blocks_for(sequence.num_tokens, self.pool.block_size) - len(cached)
        if num_missing > self.pool.num_available:
            self.pool.release(cached, owner)
            return False
        sequence.owner = owner
        sequence.table.append(cached)
        sequence.table.append(self.pool.allocate(num_missing, owner))
        sequence.num_computed = len(cached) * self.pool.block_size
        sequence.num_published = len(cached)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table long enough for `num_tokens` tokens. All or nothing."""
        num_missing = blocks_for(num_tokens, self.pool.block_size) - sequence.table.num_blocks
        if num_missing <= 0:
            return True
        if num_missing > self.pool.num_available:
            return False
        sequence.table.append(self.pool.allocate(num_missing, sequence.owner))
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offers the blocks whose K/V is complete to the cache."""
        num_full = sequence.num_computed // self.pool.block_size
        start = sequence.num_published
        if num_full <= start:
            return
        hashes = sequence.block_hashes(num_full)
        parent = hashes[start - 1] if start else None
        self.cache.extend(parent, hashes[start:], sequence.table.ids[start:num_full].tolist())
        sequence.num_published = num_full

    def change_owner(self, sequence: Sequence, owner: Owner) -> None:
        """Lets a sequence's blocks count as `owner` from now on."""
        self.pool.move(sequence.table.ids.tolist(), sequence.owner, owner)
        sequence.owner = owner

    def free(self, sequence: Sequence) -> None:
        """Lets go of a sequence's blocks; published ones stay cached. Committed K/V is given up exactly once."""
        self.pool.release(sequence.table.ids.tolist(), sequence.owner)
        sequence.table.clear()
        sequence.num_computed = 0
        sequence.num_published = 0
