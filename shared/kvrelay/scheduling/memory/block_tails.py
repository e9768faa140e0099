"""The first part of a block, shared by prompts of one request that go on differently within it.

The prefix cache shares full blocks. Prompts that are only scored, such as the choices of a `select`, mostly differ
within a block, and the tokens before that place would be computed for each of them. Such a sequence has a `tail_end`.

1. The first of them that is admitted promises the block's first part (`PrefixesInProgress`). Its chunk ends at
   `tail_end`, and the others wait in the queue.
2. When that chunk is committed, the cache gets the block under a hash of the block before and these tokens. No block
   ever follows it. The sequence itself goes on in a copy, since a cached block is not written.
3. The others are admitted with a copy of the block, and compute what follows `tail_end`.

Only sequences that are never handed over take part: a sender may read a block before the copy into it is made.
"""

from __future__ import annotations

from kvrelay.kv.cache import Cache
from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks
from kvrelay.scheduling.memory.copy_on_write import BlockCopies
from kvrelay.scheduling.sequence import Sequence


class BlockTails:
    """The tails of one pool. A cache other than the radix tree has none."""

    def __init__(self, pool: BlockPool, cache: Cache, copies: BlockCopies, sessions: SessionBlocks) -> None:
        self._block_size = pool.block_size
        self._pool = pool
        self._cache = cache
        self._copies = copies
        self._sessions = sessions
        self._is_used = isinstance(cache, PrefixCache)

    def usable(self, sequence: Sequence) -> BlockHash | None:
        """The tail that the sequence may begin behind, cached or not; None if it has none, or needs logits of it."""
        if sequence.tail_end and sequence.tail_end == sequence.sampling.logprob_start_len - 1:
            return self._hash_of(sequence)
        return None

    def to_compute(self, sequence: Sequence, position: int) -> BlockHash | None:
        """The tail that a sequence computes for others if it is admitted with its first `position` tokens computed."""
        if position >= sequence.tail_end:
            return None
        tail = self._hash_of(sequence)
        return None if tail is None or self.is_cached(tail) else tail

    def is_cached(self, tail: BlockHash) -> bool:
        """Does not count as a use."""
        return self._cache.peek((tail,)) == 1

    def publish(self, sequence: Sequence) -> None:
        """The sequence has computed its tail. Offers it to the cache, and gives the sequence a copy of the block.

        Does nothing if the tail is cached already, or if the blocks before it are not. Needs an available block.
        """
        index = sequence.tail_end // self._block_size
        tail = self._hash_of(sequence)
        if tail is None or sequence.num_published != index or self.is_cached(tail):
            return
        block = int(sequence.table.ids[index])
        self._cache.extend(sequence.hashes[index - 1] if index else None, (tail,), (block,))
        if self._pool.is_cached(block):
            self._sessions.published(sequence.origin.session, (tail,))
            self._copies.make_own(sequence.table, index, sequence.block_state)

    def _hash_of(self, sequence: Sequence) -> BlockHash | None:
        if not self._is_used:
            return None
        size = self._block_size
        num_full = sequence.tail_end // size
        parent = sequence.block_hashes(num_full)[-1] if num_full else sequence.root
        tokens = sequence.tokens.view(num_full * size, sequence.tail_end)
        return hash_blocks(parent, tokens, len(tokens))[0]
