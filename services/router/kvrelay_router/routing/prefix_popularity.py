"""How much a prefix is asked for: what is asked for often is worth having twice.

Each use of a block counts one, and counts half after `HALF_LIFE_S`. Blocks that were not used for `FORGET_S` are
forgotten, and of more than `MAX_BLOCKS` the longest unused ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay_router.routing.prefix_tree import PrefixNode, PrefixTree
from kvrelay_router.routing.prefix_view import BlockHash

HALF_LIFE_S = 2.0
FORGET_S = 20.0
MAX_BLOCKS = 1 << 18
"""About 20 MB; with blocks of 16 tokens, four million tokens of prompts."""


class PrefixPopularity:
    """Uses of each block of late. `now` is the caller's monotonic seconds."""

    def __init__(self) -> None:
        self._tree = PrefixTree()  # with the uses by the time that each was last used

    def used(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A prompt with these blocks was placed."""
        for node in self._tree.use(hashes):
            node.at, node.count = now, 1.0 + _decayed(node, now)
        self._tree.forget(now - FORGET_S, MAX_BLOCKS)

    def of(self, hashes: Sequence[BlockHash], now: float) -> float:
        """Uses of late of the last of a chain's blocks."""
        for node, num_blocks in self._tree.walk(hashes):
            if num_blocks == len(hashes):
                return _decayed(node, now)
        return 0.0


def _decayed(node: PrefixNode, now: float) -> float:
    return node.count * float(0.5 ** ((now - node.at) / HALF_LIFE_S)) if node.count else 0.0
