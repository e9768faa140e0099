"""From a block's hash to the block, for caches that gain and lose blocks all the time.

A plain dict would do, but for two things: a dict that loses as many entries as it gains still grows (CPython triples it
when its slots, the deleted ones too, are used up), and at a million blocks growing takes a tenth of a second, in the
middle of a step. So there are 256 dicts, by the hash's first byte, each rebuilt when a quarter of it has been deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvrelay.kv.hashing import BlockHash

_MIN_DROPPED = 16


class BlockIndex:
    """A mapping of hashes to block ids. The first byte of a hash must be random: it selects the shard."""

    def __init__(self) -> None:
        self.shards: list[dict[BlockHash, int]] = [{} for _ in range(256)]
        """`shards[hash[0]]` contains the entry of `hash`. Read only. Removals may replace a shard by a new dict."""
        self._num_dropped = [0] * 256
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.shards[block_hash[0]]

    def __getitem__(self, block_hash: BlockHash) -> int:
        return self.shards[block_hash[0]][block_hash]

    def get(self, block_hash: BlockHash) -> int | None:
        """The block, or None."""
        return self.shards[block_hash[0]].get(block_hash)

    def blocks(self) -> Iterator[int]:
        """All blocks, in no order to rely on."""
        for shard in self.shards:
            yield from shard.values()

    def add(self, hashes: Sequence[BlockHash], blocks: Iterable[int]) -> None:
        """Adds entries for new hashes."""
        shards = self.shards
        for block_hash, block in zip(hashes, blocks, strict=True):
            shards[block_hash[0]][block_hash] = block
        self._num_entries += len(hashes)

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        """Drops the entries of these hashes, all of which are there."""
        shards, num_dropped = self.shards, self._num_dropped
        for block_hash in hashes:
            number = block_hash[0]
            shard = shards[number]
            del shard[block_hash]
            num_dropped[number] += 1
            if num_dropped[number] > _MIN_DROPPED + len(shard) // 4:
                shards[number] = dict(shard)
                num_dropped[number] = 0
        self._num_entries -= len(hashes)
