"""Prefixes by worker without an index, and until the index has heard: what this router itself sent where.

A worker that gets a prompt will hold its blocks. An index learns that after the computation; requests that come before
would scatter. So each decision is remembered: as a bounded guess of the worker's cache, least recently used blocks out
first, a chain's end before its beginning, as workers evict. What two sources say of a worker is not added: the longer
match counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from kvrelay_router.routing.prefix_tree import PrefixTree
from kvrelay_router.routing.prefix_view import BlockHash, PrefixView, WorkerId


class NoPrefixes:
    """A `PrefixView` that knows of nothing."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """Empty."""
        return {}


class ExpectedPrefixes:
    """A `PrefixView` over `base` and this router's own decisions.

    A decision counts for `lifetime_s` (monotonic seconds; the index is right by then), or, with None, until the
    worker's pool has been filled by later ones: for fleets without an index.
    """

    def __init__(self, base: PrefixView | None = None, lifetime_s: float | None = None) -> None:
        self._base = base or NoPrefixes()
        self._lifetime_s = inf if lifetime_s is None else lifetime_s
        self._workers: dict[WorkerId, PrefixTree] = {}
        self.now = 0.0
        """To be set before each use by whoever owns the clock."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """See `PrefixView`. Of each worker as many steps as the chain has nodes there."""
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
        """A prompt with these blocks went to a worker whose pool has `num_blocks` (0: not known, nothing is kept)."""
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
