"""Chains of block hashes as a radix tree that drops the least recently used nodes first.

A node is a run of blocks that were always used together, so a prompt of hundreds of blocks is a few nodes: those that
it shares with other prompts, and the rest. A block's hash covers all blocks before it. If two chains have a block in
common, they have all blocks before it in common, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvrelay.kv.hashing import BlockHash


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
    if run == hashes[position : position + len(run)]:
        return len(run)
    low, high = 1, min(len(run), len(hashes) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == hashes[position + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
