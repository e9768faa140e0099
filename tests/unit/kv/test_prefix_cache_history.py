"""Random histories of pool and prefix cache against a slow, obvious oracle.

The oracle keeps the cached prefixes as a dict and recomputes everything else by its definition: what is pinned, what is
evictable, which leaf goes first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.kv.cache import PrefixCache, Removed, Stored
from kvrelay.kv.errors import BlockError, OutOfBlocks
from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import BlockTable, copy_on_write, finish_copy

BLOCK_SIZE = 2
ROOT = root_hash(model="m")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
PICK = st.integers(0, 2**16)
KINDS = [Owner.RUNNING, Owner.COMPUTING, Owner.RESERVED, Owner.IN_FLIGHT, Owner.QUARANTINED]  # weakest first


@dataclass
class Node:
    """A cached block in the oracle."""

    block: int
    parent: BlockHash | None
    last_use: int


@dataclass
class Oracle:
    """The pool's holds and the cached prefixes, by definition."""

    holds: Counter[tuple[int, Owner]] = field(default_factory=Counter)
    nodes: dict[BlockHash, Node] = field(default_factory=dict)
    now: int = 0

    def is_held(self, block: int) -> bool:
        return any(self.holds[block, kind] for kind in KINDS)

    def label(self, block: int) -> Owner:
        held = [kind for kind in KINDS if self.holds[block, kind]]
        cached = any(node.block == block for node in self.nodes.values())
        return held[-1] if held else Owner.CACHED if cached else Owner.FREE

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
    """Somebody who holds blocks."""

    hashes: list[BlockHash]
    table: BlockTable
    owner: Owner
    num_published: int = 0

    @property
    def blocks(self) -> list[int]:
        blocks: list[int] = self.table.ids.tolist()
        return blocks


class PoolAndCache(RuleBasedStateMachine):
    """Sequences come, publish, fork, write and go."""

    @initialize(num_blocks=st.integers(1, 24))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool, record_events=True)
        self.oracle = Oracle()
        self.sequences: list[Sequence] = []
        self.index: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    def allocate(self, num_blocks: int, owner: Owner, after: int | None = None) -> list[int] | None:
        num_free = sum(self.oracle.label(block) is Owner.FREE for block in range(self.pool.num_blocks))
        available = num_free + len(self.oracle.nodes.keys() - self.oracle.pinned())
        if num_blocks > available:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(num_blocks, owner, after=after)
            assert (caught.value.needed, caught.value.available) == (num_blocks, available)
            return None
        blocks = self.pool.allocate(num_blocks, owner, after=after)
        self.oracle.evict(num_blocks - num_free)
        assert len(set(blocks)) == num_blocks
        assert all(self.oracle.label(block) is Owner.FREE for block in blocks)
        self.oracle.holds.update((block, owner) for block in blocks)
        return blocks

    def hold(self, blocks: list[int], owner: Owner) -> None:
        self.pool.hold(blocks, owner)
        self.oracle.holds.update((block, owner) for block in blocks)

    def release(self, blocks: list[int], owner: Owner) -> None:
        pinned = self.oracle.pinned()
        self.pool.release(blocks, owner)
        self.oracle.holds.subtract((block, owner) for block in blocks)
        self.oracle.let_go(pinned)

    @rule(tokens=TOKENS, owner=st.sampled_from(KINDS), share=st.booleans())
    def admit(self, tokens: list[int], owner: Owner, share: bool) -> None:
        hashes = hash_blocks(ROOT, tokens, BLOCK_SIZE)
        self.parents.update(zip(hashes, [None, *hashes], strict=False))
        matched: list[int] = []
        if share:
            expected = self.oracle.prefix(hashes)
            assert self.cache.peek(hashes) == len(expected)
            matched = self.cache.match(hashes)
            assert matched == [self.oracle.nodes[block_hash].block for block_hash in expected]
            self.oracle.use(set(expected))
        self.hold(matched, owner)
        fresh = self.allocate(-(-len(tokens) // BLOCK_SIZE) - len(matched), owner)
        if fresh is None:
            self.release(matched, owner)
        else:
            self.sequences.append(Sequence(hashes, BlockTable(BLOCK_SIZE, matched + fresh), owner, len(matched)))

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, num_blocks=st.integers(1, 3))
    def grow(self, number: int, num_blocks: int) -> None:
        sequence = self.pick(number)
        blocks = self.allocate(num_blocks, sequence.owner, after=sequence.blocks[-1])
        sequence.table.append(blocks or [])

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, share=st.booleans())
    def publish_all(self, number: int, share: bool) -> None:
        sequence = self.pick(number)
        blocks = sequence.blocks[: len(sequence.hashes)]
        stored = self.cache.insert(sequence.hashes, blocks)
        assert stored == self.oracle.store(None, sequence.hashes, blocks)
        self.oracle.use(set(sequence.hashes))
        sequence.num_published = len(sequence.hashes)
        for index, (own, cached) in enumerate(zip(blocks, stored, strict=True)):
            if share and own != cached:
                self.hold([cached], sequence.owner)
                sequence.table.replace(index, cached)
                self.release([own], sequence.owner)
                self.oracle.now += 1

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, num_blocks=st.integers(1, 3))
    def publish_next(self, number: int, num_blocks: int) -> None:
        sequence = self.pick(number)
        start, stop = sequence.num_published, sequence.num_published + num_blocks
        parent = sequence.hashes[start - 1] if start else None
        hashes = sequence.hashes[start:stop]
        blocks = sequence.blocks[start : start + len(hashes)]
        stored = self.cache.extend(parent, hashes, blocks)
        if parent is None or parent in self.oracle.nodes:
            assert stored == self.oracle.store(parent, hashes, blocks)
        else:
            assert stored == blocks
        sequence.num_published += len(hashes)

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, owner=st.sampled_from(KINDS))
    def change_owner(self, number: int, owner: Owner) -> None:
        sequence = self.pick(number)
        self.pool.move(sequence.blocks, sequence.owner, owner)
        self.oracle.holds.subtract((block, sequence.owner) for block in sequence.blocks)
        self.oracle.holds.update((block, owner) for block in sequence.blocks)
        sequence.owner = owner

    @precondition(lambda self: self.sequences)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        self.hold(parent.blocks, parent.owner)
        table = BlockTable(BLOCK_SIZE, parent.blocks)
        self.sequences.append(Sequence(list(parent.hashes), table, parent.owner, parent.num_published))

    @precondition(lambda self: self.sequences)
    @rule(number=PICK)
    def write_at_the_end(self, number: int) -> None:
        sequence = self.pick(number)
        source = sequence.blocks[-1]
        shared = sum(self.oracle.holds[source, kind] for kind in KINDS) > 1 or self.pool.is_cached(source)
        if shared and not self.pool.num_available:
            return
        pinned = self.oracle.pinned()
        copy = copy_on_write(self.pool, sequence.table, sequence.table.num_blocks - 1, sequence.owner)
        assert (copy is not None) == shared
        if copy is None:
            return
        if self.oracle.label(copy.target) is Owner.CACHED:
            assert self.oracle.evict(1) == [copy.target]
        self.oracle.holds[copy.target, sequence.owner] += 1
        finish_copy(self.pool, copy)
        self.oracle.holds[source, sequence.owner] -= 1
        self.oracle.let_go(pinned)
        # From the written block on it is another prefix.
        del sequence.hashes[sequence.table.num_blocks - 1 :]
        sequence.num_published = min(sequence.num_published, len(sequence.hashes))

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, backwards=st.booleans())
    def finish(self, number: int, backwards: bool) -> None:
        sequence = self.sequences.pop(number % len(self.sequences))
        blocks = sequence.table.clear()
        self.release(blocks[::-1] if backwards else blocks, sequence.owner)

    @rule(num_blocks=st.integers(0, 8))
    def evict(self, num_blocks: int) -> None:
        assert self.cache.evict(num_blocks) == self.oracle.evict(num_blocks)

    @precondition(lambda self: self.oracle.nodes)
    @rule(number=PICK)
    def remove(self, number: int) -> None:
        pinned = self.oracle.pinned()
        block_hash = sorted(self.oracle.nodes)[number % len(self.oracle.nodes)]
        removed = self.cache.remove([block_hash, bytes(16)])
        assert len(removed) == len(set(removed))
        assert set(removed) == self.oracle.remove(block_hash)
        self.oracle.let_go(pinned)

    @precondition(lambda self: len(self.oracle.nodes) > 4)
    @rule()
    def clear(self) -> None:
        assert set(self.cache.clear()) == {node.block for node in self.oracle.nodes.values()}
        self.oracle.nodes.clear()

    @rule(block=st.integers(-1, 24), owner=st.sampled_from(KINDS))
    def illegal_operations_raise(self, block: int, owner: Owner) -> None:
        inside = 0 <= block < self.pool.num_blocks
        if not inside or self.oracle.label(block) is Owner.FREE:
            with pytest.raises(BlockError):
                self.pool.hold([block], owner)
            with pytest.raises(BlockError):
                self.cache.insert([bytes(16)], [block])
        if not inside or not self.oracle.holds[block, owner]:
            with pytest.raises(BlockError):
                self.pool.release([block], owner)

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.oracle.now += 1
        self.pool.check_integrity()
        labels = [self.oracle.label(block) for block in range(self.pool.num_blocks)]
        assert [self.pool.owner_of(block) for block in range(self.pool.num_blocks)] == labels
        assert self.pool.counts() == {owner: labels.count(owner) for owner in Owner}
        assert self.cache.num_cached == len(self.oracle.nodes)
        assert self.cache.num_evictable == len(self.oracle.nodes.keys() - self.oracle.pinned())
        for block_hash, node in self.oracle.nodes.items():
            assert self.cache.block_of(block_hash) == node.block

    @invariant()
    def events_feed_an_index_that_is_closed_under_prefixes(self) -> None:
        for event in self.cache.drain_events():
            assert len(event.hashes) > 0
            if isinstance(event, Stored):
                assert [self.parents[h] for h in event.hashes] == [event.parent_hash, *event.hashes[:-1]]
                assert event.parent_hash is None or event.parent_hash in self.index
                assert self.index.isdisjoint(event.hashes)
                self.index.update(event.hashes)
            else:
                assert isinstance(event, Removed)
                for block_hash in event.hashes:
                    self.index.remove(block_hash)
                    assert all(self.parents[other] != block_hash for other in self.index)
        assert self.index == self.oracle.nodes.keys()


TestPoolAndCache = PoolAndCache.TestCase
TestPoolAndCache.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
