"""The prefixes that this router's own decisions have put into the workers' caches.

A worker that gets a prompt will cache its blocks, but an index reports them only after the computation. Requests that
arrive before would go to other workers. So each decision is kept here, as an estimate of the worker's cache with the
same eviction: least recently used blocks first, the end of a chain before its beginning. If the index and the estimate
differ for a worker, the longer match counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from kvrelay_router.routing.prefix_tree import PrefixTree
from kvrelay_router.routing.prefix_view import BlockHash, PrefixView, WorkerId


class NoPrefixes:
    """A `PrefixView` without prefixes."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return {}


class ExpectedPrefixes:
    """A `PrefixView` over `base` and this router's own decisions.

    A decision counts for `lifetime_s` seconds, after which the index has reported it. Without an index, `lifetime_s` is
    None: a decision counts until later ones have filled the worker's pool.
    """

    def __init__(self, base: PrefixView | None = None, lifetime_s: float | None = None) -> None:
        self._base = base or NoPrefixes()
        self._lifetime_s = inf if lifetime_s is None else lifetime_s
        self._workers: dict[WorkerId, PrefixTree] = {}
        self.now = 0.0
        """Monotonic seconds. The caller sets it before each use."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """See `PrefixView`. Takes one step per worker and tree node of the chain."""
        found = dict(self._base.match(hashes))
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

    def sent(self, worker_id: WorkerId, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """A prompt with these blocks went to a worker whose pool has `num_blocks` (0: unknown, nothing is kept)."""
        if not num_blocks:
            return
        tree = self._workers.get(worker_id)
        if tree is None:
            tree = self._workers[worker_id] = PrefixTree()
        for node in tree.use(hashes):
            node.at = self.now
        tree.forget(self.now - self._lifetime_s, num_blocks)

    def gone(self, worker_id: WorkerId) -> None:
        """The worker ended, or lost its cache."""
        self._workers.pop(worker_id, None)
