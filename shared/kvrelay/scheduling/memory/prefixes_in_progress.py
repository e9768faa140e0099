"""Prefixes that running prompts are about to publish, so that no other sequence computes them: full blocks, and tails.

A tail is the first part of a block, shared by prompts of one request that go on differently within it.
The prefix cache shares full blocks. Prompts that are only scored, such as the choices of a `select`, mostly differ
within a block, and the tokens before that place, the tail's end, would be computed for each of them.

1. The first of them that is admitted promises the block's first part (`PrefixesInProgress`). Its chunk ends there, and
   the others wait in the queue.
2. When that chunk is committed, the cache gets the block under a hash of the block before and these tokens. No block
   ever follows it. The sequence itself goes on in a copy, since a cached block is not written.
3. The others are admitted with a copy of the block, and compute what follows the tail.

Only sequences that are never handed over have tails: a sender may read a block before the copy into it is made.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.kv.ablations import NullCache
from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.copy_on_write import BlockCopies
from kvrelay.scheduling.sequence import Sequence


class PrefixesInProgress:
    """Promised blocks by hash; several sequences may promise the same block. A promise ends when the block is published
    or the promise is withdrawn."""

    def __init__(self) -> None:
        self._num_promised: dict[BlockHash, int] = {}
        self._promises: dict[SequenceKey, Seq[BlockHash]] = {}
        self._num_kept: dict[SequenceKey, int] = {}
        self._tails: dict[SequenceKey, BlockHash] = {}

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._num_promised

    def __len__(self) -> int:
        return len(self._num_promised)

    def promise(self, key: SequenceKey, hashes: Seq[BlockHash]) -> None:
        """A sequence starts to compute these blocks, in this order."""
        if not hashes:
            return
        self._promises[key] = hashes
        self._num_kept[key] = 0
        for block_hash in hashes:
            self._num_promised[block_hash] = self._num_promised.get(block_hash, 0) + 1

    def promise_tail(self, key: SequenceKey, tail: BlockHash) -> None:
        """A sequence starts to compute this tail."""
        self._tails[key] = tail
        self._num_promised[tail] = self._num_promised.get(tail, 0) + 1

    def tail_ended(self, key: SequenceKey) -> Seq[BlockHash]:
        """A sequence has computed its tail, or stops. Returns the tail, if it had promised one."""
        tail = self._tails.pop(key, None)
        if tail is None:
            return ()
        self._drop((tail,))
        return (tail,)

    def kept(self, key: SequenceKey, num_blocks: int) -> None:
        """A sequence has published the next `num_blocks` of the blocks that it promised."""
        hashes = self._promises.get(key)
        if hashes is None:
            return
        start = self._num_kept[key]
        self._drop(hashes[start : start + num_blocks])
        self._num_kept[key] = start + num_blocks
        if start + num_blocks >= len(hashes):
            del self._promises[key], self._num_kept[key]

    def withdraw(self, key: SequenceKey) -> Seq[BlockHash]:
        """A sequence stops. Returns the blocks that it had promised and not published."""
        tail = self.tail_ended(key)
        hashes = self._promises.pop(key, None)
        if hashes is None:
            return tail
        rest = hashes[self._num_kept.pop(key) :]
        self._drop(rest)
        return [*rest, *tail] if tail else rest

    def _drop(self, hashes: Seq[BlockHash]) -> None:
        counts = self._num_promised
        for block_hash in hashes:
            if counts[block_hash] == 1:
                del counts[block_hash]
            else:
                counts[block_hash] -= 1


class BlockTails:
    """The tails of one pool. A cache other than the radix tree has none."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, copies: BlockCopies, sessions: SessionBlocks) -> None:
        self._block_size = pool.block_size
        self._pool = pool
        self._cache = cache
        self._copies = copies
        self._sessions = sessions
        self._is_used = not isinstance(cache, NullCache)
        self._ends: dict[Sequence, int] = {}
        self.computing: dict[Sequence, int] = {}
        """Sequences that compute their tail for others too, and where it ends: a chunk of theirs ends there."""

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._ends

    def enter(self, sequence: Sequence) -> None:
        """A sequence joins. It has a tail if other prompts of its request have the same tokens up to a position within
        a block, and only these."""
        num_shared = sequence.sampling.num_shared
        is_tail = num_shared % self._block_size and num_shared < sequence.num_tokens - 1
        if is_tail and sequence.num_unneeded:
            self._ends[sequence] = num_shared

    def ended(self, sequence: Sequence) -> None:
        """A sequence leaves."""
        self._ends.pop(sequence, None)

    def end_of(self, sequence: Sequence) -> int:
        """Returns the number of tokens up to the end of a sequence's tail; 0 if it has none."""
        return self._ends.get(sequence, 0)

    def begin(self, sequence: Sequence) -> BlockHash | None:
        """A sequence was admitted. Returns the tail that it computes for others from now on, if any."""
        tail = self.to_compute(sequence, sequence.num_computed)
        if tail is not None:
            self.computing[sequence] = self._ends[sequence]
        return tail

    def stopped(self, sequence: Sequence) -> None:
        """A sequence has computed its tail, or stops before."""
        self.computing.pop(sequence, None)

    def usable(self, sequence: Sequence) -> BlockHash | None:
        """The tail that the sequence may begin behind, cached or not; None if it has none, or needs logits of it."""
        end = self._ends.get(sequence)
        if end is not None and end == sequence.sampling.logprob_start_len - 1:
            return self._hash_of(sequence)
        return None

    def to_compute(self, sequence: Sequence, position: int) -> BlockHash | None:
        """The tail that a sequence computes for others if it is admitted with its first `position` tokens computed."""
        if position >= self.end_of(sequence):
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
        index = self._ends[sequence] // self._block_size
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
        size, end = self._block_size, self._ends[sequence]
        num_full = end // size
        parent = sequence.block_hashes(num_full)[-1] if num_full else sequence.root
        tokens = sequence.tokens.view(num_full * size, end)
        return hash_blocks(parent, tokens, len(tokens))[0]
