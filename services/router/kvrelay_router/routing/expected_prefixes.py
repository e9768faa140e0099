"""The prefixes that this router's own decisions have put into the workers' caches, and how often each is used.

A worker that gets a prompt will cache its blocks, but an index reports them only after the computation. Requests that
arrive before would go to other workers. So each decision is kept here, as an estimate of the worker's cache with the
same eviction: least recently used blocks first, the end of a chain before its beginning. If the index and the estimate
differ for a worker, the longer match counts. A worker computes a prompt behind those sent to it before, so it will find
their blocks. It will not find those of a handoff that another worker has still to compute: they are kept apart until
the handoff is committed.

Chains of block hashes are kept as a radix tree. A node is a run of blocks that were always used together, so a prompt
of hundreds of blocks is a few nodes: those that it shares with other prompts, and the rest. A block's hash covers all
blocks before it. If two chains have a block in common, they have all blocks before it in common, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

from kvrelay.kv.hashing import BlockHash, num_in_common

HALF_LIFE_S = 2.0
FORGET_S = 20.0
MAX_BLOCKS = 1 << 18
"""About 20 MB; with blocks of 16 tokens, four million tokens of prompts."""


class PrefixNode:
    """A run of blocks. `at` is the time of the last use; `count` belongs to the owner of the tree."""

    __slots__ = ("at", "children", "count", "hashes", "parent")

    def __init__(self, hashes: list[BlockHash], parent: PrefixNode | None) -> None:
        self.hashes = hashes
        self.parent = parent  # None for the root, which has no blocks
        self.children: dict[BlockHash, PrefixNode] = {}  # keyed by their first blocks
        self.at = 0.0
        self.count = 0.0


class PrefixTree:
    """The caller of `use` sets `at` of the returned nodes, to times that never decrease."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._root = PrefixNode([], None)
        self._by_use: OrderedDict[PrefixNode, None] = OrderedDict()  # oldest use first, children before parents

    def use(self, hashes: Sequence[BlockHash]) -> list[PrefixNode]:
        """Returns the nodes of this chain from its beginning. The last one may be new, with `at` and `count` 0."""
        path, node, position = [], self._root, 0
        while position < len(hashes):
            child = node.children.get(hashes[position])
            if child is None:
                node = self._add(node, list(hashes[position:]))
                position = len(hashes)
            else:
                num_common = _num_common(child.hashes, hashes, position)
                node = child if num_common == len(child.hashes) else self._split(child, num_common)
                position += num_common
            path.append(node)
        for node in reversed(path):
            self._by_use[node] = None
            self._by_use.move_to_end(node)
        return path

    def walk(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[PrefixNode, int]]:
        """Yields the nodes along this chain, with the number of the chain's blocks up to and including the node.

        The last node may have more blocks than the chain shares with it.
        """
        node, position = self._root, 0
        while position < len(hashes):
            child = node.children.get(hashes[position])
            if child is None:
                return
            num_common = _num_common(child.hashes, hashes, position)
            position += num_common
            yield child, position
            if num_common < len(child.hashes):
                return
            node = child

    def forget(self, before: float, num_kept: int) -> None:
        """Drops blocks last used before a time, and the least recently used ones beyond `num_kept`.

        The end of a chain is dropped before its beginning.
        """
        while self._by_use:
            node = next(iter(self._by_use))
            num_gone = len(node.hashes) if node.at < before else self.num_blocks - num_kept
            if num_gone <= 0:
                return
            if num_gone < len(node.hashes):
                del node.hashes[-num_gone:]
                self.num_blocks -= num_gone
                return
            self._remove(node)

    def check_integrity(self) -> None:
        """Raises AssertionError if a block would never be dropped, or dropped before the blocks behind it."""
        order = {node: place for place, node in enumerate(self._by_use)}
        assert self.num_blocks == sum(len(node.hashes) for node in order)
        for node, place in order.items():
            assert node.hashes and node.parent is not None
            assert node.parent.children[node.hashes[0]] is node
            assert node.parent is self._root or order[node.parent] > place
            assert all(child in order for child in node.children.values())

    def _add(self, parent: PrefixNode, hashes: list[BlockHash]) -> PrefixNode:
        node = parent.children[hashes[0]] = PrefixNode(hashes, parent)
        self.num_blocks += len(hashes)
        return node

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """Makes a parent node of the first blocks, which is about to be used. The rest keeps its place in the order."""
        assert node.parent is not None
        first = node.parent.children[node.hashes[0]] = PrefixNode(node.hashes[:num_blocks], node.parent)
        first.at, first.count = node.at, node.count
        node.parent = first
        del node.hashes[:num_blocks]
        first.children[node.hashes[0]] = node
        return first

    def _remove(self, node: PrefixNode) -> None:
        """The node must not have children: they are dropped first."""
        assert node.parent is not None and not node.children
        del node.parent.children[node.hashes[0]]
        del self._by_use[node]
        self.num_blocks -= len(node.hashes)


def _num_common(run: list[BlockHash], hashes: Sequence[BlockHash], position: int) -> int:
    """Returns how many blocks of a run match a chain at this position. The first one does."""
    others = hashes[position : position + len(run)]
    return len(run) if run == others else num_in_common([run, others], least=1)


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
