"""The prefixes that this router's own decisions have put into the workers' caches, and how often each is used.

A worker that gets a prompt will cache its blocks, but an index reports them only after the computation. Requests that
arrive before would go to other workers. So each decision is kept here, as an estimate of the worker's cache with the
same eviction: least recently used blocks first, the end of a chain before its beginning. If the index and the estimate
differ for a worker, the longer match counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from kvrelay.kv.hashing import BlockHash
from kvrelay_router.routing.prefix_tree import PrefixNode, PrefixTree

HALF_LIFE_S = 2.0
FORGET_S = 20.0
MAX_BLOCKS = 1 << 18
"""About 20 MB; with blocks of 16 tokens, four million tokens of prompts."""


class PrefixView(Protocol):
    """The prefix index of the fleet, or an estimate of it."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Returns the number of leading blocks of a chain that each worker holds, by worker id. Workers with 0 are left
        out."""
        ...


class ExpectedPrefixes:
    """A `PrefixView` over `base` and this router's own decisions.

    A decision counts for `lifetime_s` seconds, after which the index has reported it. Without an index, `lifetime_s` is
    None: a decision counts until later ones have filled the worker's pool.
    """

    def __init__(self, base: PrefixView | None = None, lifetime_s: float | None = None) -> None:
        self._base = base
        self._lifetime_s = inf if lifetime_s is None else lifetime_s
        self._workers: dict[str, PrefixTree] = {}
        self.now = 0.0
        """Monotonic seconds. The caller sets it before each use."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """See `PrefixView`. Takes one step per worker and tree node of the chain."""
        found = dict(self._base.match(hashes)) if self._base is not None else {}
        oldest = self.now - self._lifetime_s
        for worker_id, tree in self._workers.items():
            num_held = 0
            for node, num_blocks in tree.walk(hashes):
                if node.at < oldest:
                    break
                num_held = num_blocks
            if num_held > found.get(worker_id, 0):
                found[worker_id] = num_held
        return found

    def sent(self, worker_id: str, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """A prompt with these blocks went to a worker whose pool has `num_blocks` (0: unknown, nothing is kept)."""
        if not num_blocks:
            return
        tree = self._workers.get(worker_id)
        if tree is None:
            tree = self._workers[worker_id] = PrefixTree()
        for node in tree.use(hashes):
            node.at = self.now
        tree.forget(self.now - self._lifetime_s, num_blocks)

    def gone(self, worker_id: str) -> None:
        """The worker ended, or lost its cache."""
        self._workers.pop(worker_id, None)


class PrefixPopularity:
    """Counts recent uses of each block: a popular prefix is worth a second copy. `now` is in monotonic seconds.

    Each use of a block counts one, and half after `HALF_LIFE_S`. Blocks without a use in `FORGET_S` are dropped, and so
    are the least recently used ones beyond `MAX_BLOCKS`.
    """

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
