"""A slow, obvious oracle of pool and prefix cache, and what its histories consist of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable

BLOCK_SIZE = 2
KINDS = [  # weakest first
    BlockState.RUNNING,
    BlockState.COMPUTING,
    BlockState.RESERVED,
    BlockState.IN_FLIGHT,
    BlockState.QUARANTINED,
]


@dataclass
class Node:
    """A cached block in the oracle."""

    block: int
    parent: BlockHash | None
    last_use: int


@dataclass
class Oracle:
    """The pool's holds and the cached prefixes, by definition."""

    holds: Counter[tuple[int, BlockState]] = field(default_factory=Counter)
    nodes: dict[BlockHash, Node] = field(default_factory=dict)
    now: int = 0

    def is_held(self, block: int) -> bool:
        return any(self.holds[block, kind] for kind in KINDS)

    def state_of(self, block: int) -> BlockState:
        held = [kind for kind in KINDS if self.holds[block, kind]]
        cached = any(node.block == block for node in self.nodes.values())
        return held[-1] if held else BlockState.CACHED if cached else BlockState.FREE

    def pinned(self) -> set[BlockHash]:
        """Cached blocks that are held, and all above them."""
        pinned: set[BlockHash] = set()
        for block_hash, node in self.nodes.items():
            above: BlockHash | None = block_hash
            while self.is_held(node.block) and above is not None and above not in pinned:
                pinned.add(above)
                above = self.nodes[above].parent
        return pinned

    def prefix(self, hashes: list[BlockHash]) -> list[BlockHash]:
        length = next((index for index, block_hash in enumerate(hashes) if block_hash not in self.nodes), len(hashes))
        return hashes[:length]

    def use(self, hashes: set[BlockHash]) -> None:
        for block_hash in hashes:
            self.nodes[block_hash].last_use = self.now

    def let_go(self, pinned_before: set[BlockHash]) -> None:
        """What is pinned no longer was used until now."""
        self.use((pinned_before - self.pinned()) & self.nodes.keys())

    def evict(self, num_blocks: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            parents = {node.parent for node in self.nodes.values()}
            leaves = [h for h, node in self.nodes.items() if h not in parents and not self.is_held(node.block)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda leaf: self.nodes[leaf].last_use)
            evicted.append(self.nodes.pop(oldest).block)
        return evicted

    def store(self, parent: BlockHash | None, hashes: list[BlockHash], blocks: list[int]) -> list[int]:
        for block_hash, block in zip(hashes, blocks, strict=True):
            self.nodes.setdefault(block_hash, Node(block, parent, self.now))
            parent = block_hash
        return [self.nodes[block_hash].block for block_hash in hashes]

    def remove(self, root: BlockHash) -> set[int]:
        removed = {self.nodes.pop(root).block} if root in self.nodes else set()
        for block_hash in [h for h, node in self.nodes.items() if node.parent == root]:
            removed |= self.remove(block_hash)
        return removed


@dataclass
class Sequence:
    hashes: list[BlockHash]
    table: BlockTable
    state: BlockState
    num_published: int = 0

    @property
    def blocks(self) -> list[int]:
        blocks: list[int] = self.table.ids.tolist()
        return blocks


@dataclass
class Swapped:
    """A sequence whose blocks are on the host, and what each of them contains."""

    hashes: list[BlockHash]
    state: BlockState
    slots: tuple[int, ...]
    contents: list[object]


@dataclass
class Step:
    """A planned step: its copies, whoever waits for it, what it writes in the end; its blocks are claimed till then."""

    claimed: list[int]
    out: list[tuple[int, int]] = field(default_factory=list)  # block, slot
    back: list[tuple[int, int]] = field(default_factory=list)
    written: dict[int, object] = field(default_factory=dict)
    leaving: list[Swapped] = field(default_factory=list)
    returning: list[Swapped] = field(default_factory=list)
    coming: list[Sequence] = field(default_factory=list)
