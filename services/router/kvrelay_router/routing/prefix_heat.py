"""How much a prefix is asked for: what is asked for often is worth having twice.

Each use of a block counts one, and counts half after `HALF_LIFE_S`. Blocks that were not used for `FORGET_S` are
forgotten, and of more than `MAX_BLOCKS` the longest unused ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay_router.routing.prefix_view import BlockHash

HALF_LIFE_S = 2.0
FORGET_S = 20.0
MAX_BLOCKS = 1 << 18
"""About 60 MB; with blocks of 16 tokens, four million tokens of prompts."""


class PrefixHeat:
    """Uses of each block of late. `now` is the caller's monotonic seconds."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()  # when last used, uses by then

    def used(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A prompt with these blocks was placed."""
        blocks, first = self._blocks, (now, 1.0)
        for block_hash in hashes:
            if (last := blocks.pop(block_hash, None)) is None:
                blocks[block_hash] = first
            else:
                at, count = last
                blocks[block_hash] = now, 1.0 + count * 0.5 ** ((now - at) / HALF_LIFE_S)
        while len(blocks) > MAX_BLOCKS or (blocks and next(iter(blocks.values()))[0] < now - FORGET_S):
            blocks.popitem(last=False)

    def of(self, block_hash: BlockHash, now: float) -> float:
        """Uses of late."""
        at, count = self._blocks.get(block_hash, (now, 0.0))
        return count * float(0.5 ** ((now - at) / HALF_LIFE_S))
