"""Blocks that running prompts are about to publish, so that no other sequence computes the same prefix. At most one of
a prompt's is a tail (`memory/block_tails.py`), beside the chain of its full blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.kv.hashing import BlockHash
from kvrelay.protocol.sequence_key import SequenceKey


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
