"""Prefixes by worker without an index, and until the index has heard: what this router itself sent where.

A worker that gets a prompt will hold its blocks. An index learns that after the computation; requests that come before
would scatter. So each decision is remembered: as a bounded guess of the worker's cache, least recently used blocks out
first, a chain's end before its beginning, as workers evict. What two sources say of a worker is not added: the longer
match counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

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
        self._lifetime_s = lifetime_s
        self._workers: dict[WorkerId, OrderedDict[BlockHash, float]] = {}
        self.now = 0.0
        """To be set before each use by whoever owns the clock."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """See `PrefixView`. O(workers log blocks)."""
        found = dict(self._base.match(hashes))
        for worker_id, blocks in self._workers.items():
            num_held = self._num_held(blocks, hashes)
            if num_held > found.get(worker_id, 0):
                found[worker_id] = num_held
        return found

    def sent(self, worker_id: WorkerId, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """A prompt with these blocks went to a worker whose pool has `num_blocks` (0: not known, nothing is kept)."""
        if not num_blocks:
            return
        blocks = self._workers.setdefault(worker_id, OrderedDict())
        for block_hash in reversed(hashes):
            blocks[block_hash] = self.now
            blocks.move_to_end(block_hash)
        self._expire(blocks)
        while len(blocks) > num_blocks:
            blocks.popitem(last=False)

    def gone(self, worker_id: WorkerId) -> None:
        """The worker ended, or lost its cache."""
        self._workers.pop(worker_id, None)

    def _num_held(self, blocks: OrderedDict[BlockHash, float], hashes: Sequence[BlockHash]) -> int:
        """The chain's presence is monotone: a bisection finds its end."""
        self._expire(blocks)
        low, high = 0, len(hashes) if hashes and hashes[0] in blocks else 0  # mostly nothing
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def _expire(self, blocks: OrderedDict[BlockHash, float]) -> None:
        if self._lifetime_s is None:
            return
        oldest = self.now - self._lifetime_s
        while blocks and next(iter(blocks.values())) < oldest:
            blocks.popitem(last=False)
