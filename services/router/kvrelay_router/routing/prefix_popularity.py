"""The popularity of prefixes: a popular prefix is worth a second copy.

Each use of a block counts one, and half after `HALF_LIFE_S`. Blocks without a use in `FORGET_S` are dropped, and so are
the least recently used ones beyond `MAX_BLOCKS`.
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
    """Counts recent uses of each block. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._tree = PrefixTree()  # `count` is the number of uses, decayed to the time `at`

    def used(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A prompt with these blocks was placed."""
        for node in self._tree.use(hashes):
            node.at, node.count = now, 1.0 + _decayed(node, now)
        self._tree.forget(now - FORGET_S, MAX_BLOCKS)

    def of(self, hashes: Sequence[BlockHash], now: float) -> float:
        """Returns the recent uses of the last block of a chain."""
        for node, num_blocks in self._tree.walk(hashes):
            if num_blocks == len(hashes):
                return _decayed(node, now)
        return 0.0


def _decayed(node: PrefixNode, now: float) -> float:
    return node.count * float(0.5 ** ((now - node.at) / HALF_LIFE_S)) if node.count else 0.0
