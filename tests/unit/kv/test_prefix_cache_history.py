"""Random histories of pool and prefix cache against a slow, obvious oracle.

The oracle keeps the cached prefixes as a dict and recomputes everything else by its definition: what is pinned, what is
evictable, which leaf goes first. It also keeps what every block and every slot of the swap space contains, which proves
that no copy to the host or back reads a block too late or writes one too early.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.kv.cache import BlockError, OutOfBlocks, Removed, Stored
from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable, copy_on_write, finish_copy
from kvrelay.scheduling.memory.copy_on_write import BlockCopies
from kvrelay.scheduling.memory.swapping import SwapSpace
from tests.thoroughness import examples
from tests.unit.kv.cache_oracle import BLOCK_SIZE, KINDS, Oracle, Sequence, Step, Swapped

ROOT = root_hash(model="m")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
PICK = st.integers(0, 2**16)


class PoolAndCache(RuleBasedStateMachine):
    """Sequences come, publish, fork, write and go."""

    @initialize(num_blocks=st.integers(1, 24), num_slots=st.integers(0, 16))
    def start(self, num_blocks: int, num_slots: int) -> None:
        self.space = SwapSpace(num_slots)
        self.contents: list[object] = [None] * num_blocks
        self.host: list[object] = [None] * num_slots
        self.swapped: list[Swapped] = []
        self.step: Step | None = None
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool, record_events=True)
        self.oracle = Oracle()
        self.copies = BlockCopies(self.pool)
        self.pending: dict[int, int] = {}  # copies that are not made yet: target to source
        self.sequences: list[Sequence] = []
        self.index: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    def allocate(self, num_blocks: int, state: BlockState, after: int | None = None) -> list[int] | None:
        num_free = sum(self.oracle.state_of(block) is BlockState.FREE for block in range(self.pool.num_blocks))
        available = num_free + len(self.oracle.nodes.keys() - self.oracle.pinned())
        if num_blocks > available:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(num_blocks, state, after=after)
            assert (caught.value.needed, caught.value.available) == (num_blocks, available)
            return None
        blocks = self.pool.allocate(num_blocks, state, after=after)
        self.oracle.evict(num_blocks - num_free)
        assert len(set(blocks)) == num_blocks
        assert all(self.oracle.state_of(block) is BlockState.FREE for block in blocks)
        self.oracle.holds.update((block, state) for block in blocks)
        for block in blocks:
            self.contents[block] = object()  # whoever got it may write at once
        return blocks

    def hold(self, blocks: list[int], state: BlockState) -> None:
        self.pool.hold(blocks, state)
        self.oracle.holds.update((block, state) for block in blocks)

    def release(self, blocks: list[int], state: BlockState) -> None:
        pinned = self.oracle.pinned()
        self.pool.release(blocks, state)
        self.oracle.holds.subtract((block, state) for block in blocks)
        self.oracle.let_go(pinned)

    @rule(tokens=TOKENS, state=st.sampled_from(KINDS), share=st.booleans())
    def admit(self, tokens: list[int], state: BlockState, share: bool) -> None:
        hashes = hash_blocks(ROOT, tokens, BLOCK_SIZE)
        self.parents.update(zip(hashes, [None, *hashes], strict=False))
        matched: list[int] = []
        if share:
            expected = self.oracle.prefix(hashes)
            assert self.cache.peek(hashes) == len(expected)
            matched = self.cache.match(hashes)
            assert matched == [self.oracle.nodes[block_hash].block for block_hash in expected]
            self.oracle.use(set(expected))
        self.hold(matched, state)
        fresh = self.allocate(-(-len(tokens) // BLOCK_SIZE) - len(matched), state)
        if fresh is None:
            self.release(matched, state)
        else:
            for block, block_hash in zip(fresh, hashes[len(matched) :], strict=False):
                self.contents[block] = block_hash
            self.sequences.append(Sequence(hashes, BlockTable(BLOCK_SIZE, matched + fresh), state, len(matched)))

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, num_blocks=st.integers(1, 3))
    def grow(self, number: int, num_blocks: int) -> None:
        sequence = self.pick(number)
        blocks = self.allocate(num_blocks, sequence.state, after=sequence.blocks[-1])
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
                self.hold([cached], sequence.state)
                sequence.table.replace(index, cached)
                self.release([own], sequence.state)
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
    @rule(number=PICK, state=st.sampled_from(KINDS))
    def change_block_state(self, number: int, state: BlockState) -> None:
        sequence = self.pick(number)
        self.pool.move(sequence.blocks, sequence.state, state)
        self.oracle.holds.subtract((block, sequence.state) for block in sequence.blocks)
        self.oracle.holds.update((block, state) for block in sequence.blocks)
        sequence.state = state

    @precondition(lambda self: self.sequences)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        self.hold(parent.blocks, parent.state)
        table = BlockTable(BLOCK_SIZE, parent.blocks)
        self.sequences.append(Sequence(list(parent.hashes), table, parent.state, parent.num_published))

    @precondition(lambda self: self.sequences)
    @rule(number=PICK)
    def write_at_the_end(self, number: int) -> None:
        sequence = self.pick(number)
        source = sequence.blocks[-1]
        shared = sum(self.oracle.holds[source, kind] for kind in KINDS) > 1 or self.pool.is_cached(source)
        if shared and not self.pool.num_available:
            return
        pinned = self.oracle.pinned()
        copy = copy_on_write(self.pool, sequence.table, sequence.table.num_blocks - 1, sequence.state)
        assert (copy is not None) == shared
        if copy is None:
            return  # written in place, behind what is hashed
        if self.oracle.state_of(copy.target) is BlockState.CACHED:
            assert self.oracle.evict(1) == [copy.target]
        self.oracle.holds[copy.target, sequence.state] += 1
        self.contents[copy.target] = object()
        finish_copy(self.pool, copy)
        self.oracle.holds[source, sequence.state] -= 1
        self.oracle.let_go(pinned)
        # From the written block on it is another prefix.
        del sequence.hashes[sequence.table.num_blocks - 1 :]
        sequence.num_published = min(sequence.num_published, len(sequence.hashes))

    @precondition(lambda self: any(sequence.state is BlockState.RUNNING for sequence in self.sequences))
    @rule(number=PICK)
    def write_at_the_end_in_the_next_step(self, number: int) -> None:
        """As above, but the copy is made later, with those of others: the last holder needs none."""
        running = [sequence for sequence in self.sequences if sequence.state is BlockState.RUNNING]
        sequence = running[number % len(running)]
        source = sequence.blocks[-1]
        num_others = sum(self.oracle.holds[source, kind] for kind in KINDS) - 1
        num_others -= list(self.pending.values()).count(source)
        assert self.copies.must_copy(source) == (num_others > 0 or self.pool.is_cached(source))
        if source in self.pending or not self.copies.must_copy(source) or not self.pool.num_available:
            return
        pinned = self.oracle.pinned()
        self.copies.make_own(sequence.table, sequence.table.num_blocks - 1)
        target = sequence.blocks[-1]
        if self.oracle.state_of(target) is BlockState.CACHED:
            assert self.oracle.evict(1) == [target]
        self.oracle.holds[target, BlockState.RUNNING] += 1
        self.oracle.let_go(pinned)
        self.pending[target] = source
        del sequence.hashes[sequence.table.num_blocks - 1 :]
        sequence.num_published = min(sequence.num_published, len(sequence.hashes))

    @rule()
    def execute_a_step(self) -> None:
        pinned = self.oracle.pinned()
        copies = self.copies.plan(list(self.pending))
        assert {copy.target: copy.source for copy in copies} == self.pending
        for source in self.pending.values():
            assert self.pool.num_holds(source, BlockState.RUNNING) > 0, "its source could be given to somebody else"
        self.copies.done(copies)
        self.oracle.holds.subtract((source, BlockState.RUNNING) for source in self.pending.values())
        self.oracle.let_go(pinned)
        self.pending.clear()

    @precondition(lambda self: self.sequences)
    @rule(number=PICK, backwards=st.booleans())
    def finish(self, number: int, backwards: bool) -> None:
        sequence = self.sequences.pop(number % len(self.sequences))
        pinned = self.oracle.pinned()
        shared = {block for other in self.sequences for block in other.blocks}
        doomed = [block for block in sequence.blocks if block not in shared]
        self.copies.drop(doomed)
        for block in doomed:
            if block in self.pending:
                self.oracle.holds[self.pending.pop(block), BlockState.RUNNING] -= 1
        self.oracle.let_go(pinned)
        blocks = sequence.table.clear()
        self.release(blocks[::-1] if backwards else blocks, sequence.state)

    def claim(self, blocks: list[int]) -> list[int]:
        claimed = list(dict.fromkeys(blocks))
        self.pool.hold_or_allocate(claimed, BlockState.IN_FLIGHT)
        self.oracle.holds.update((block, BlockState.IN_FLIGHT) for block in claimed)
        return claimed

    @precondition(lambda self: self.sequences and self.step is None)
    @rule(number=PICK, num_taken=st.integers(0, 4))
    def to_host(self, number: int, num_taken: int) -> None:
        """A sequence leaves for the host; a row of the same step takes up to `num_taken` of its blocks at once."""
        sequence = self.pick(number)
        names = [*sequence.hashes, *[None] * len(sequence.blocks)][: len(sequence.blocks)]
        num_new = self.space.num_new(names)
        if num_new > self.space.num_free:
            with pytest.raises(OutOfBlocks):
                self.space.store(names)
            return
        stored = self.space.store(names)
        assert len(stored.new) == num_new
        blocks = sequence.blocks
        contents = [self.contents[block] for block in blocks]
        self.sequences.remove(sequence)
        self.release(blocks, sequence.state)
        before = list(self.contents)
        taken = self.allocate(num_taken, BlockState.RUNNING) or []
        written = {block: self.contents[block] for block in taken}
        self.contents = before
        step = Step(self.claim([blocks[index] for index in stored.new]), written=written)
        step.out = [(blocks[index], stored.slots[index]) for index in stored.new]
        step.leaving.append(Swapped(list(sequence.hashes), sequence.state, stored.slots, contents))
        if taken:
            step.coming.append(Sequence([], BlockTable(BLOCK_SIZE, taken), BlockState.RUNNING))
        self.step = step

    @precondition(lambda self: self.swapped and self.step is None)
    @rule(number=PICK)
    def from_host(self, number: int) -> None:
        """What the cache still has is shared, the rest is copied back."""
        swapped = self.swapped[number % len(self.swapped)]
        matched = self.cache.match(swapped.hashes)
        self.oracle.use(set(self.oracle.prefix(swapped.hashes)))
        self.hold(matched, swapped.state)
        before = list(self.contents)
        fresh = self.allocate(len(swapped.slots) - len(matched), swapped.state)
        self.contents = before
        if fresh is None:
            self.release(matched, swapped.state)
            return
        self.swapped.remove(swapped)
        back = list(zip(fresh, swapped.slots[len(matched) :], strict=True))
        table = BlockTable(BLOCK_SIZE, matched + fresh)
        coming = Sequence(swapped.hashes, table, swapped.state, len(matched))
        self.step = Step(self.claim(fresh), back=back, returning=[swapped], coming=[coming])

    @precondition(lambda self: self.step is not None)
    @rule(abort=st.booleans())
    def land(self, abort: bool) -> None:
        """The step is executed: out, then in, then its rows' writes. With `abort`, those that come are gone already."""
        step = self.step
        assert step is not None
        granted: list[int] = []
        if abort:
            for sequence in step.coming:
                self.release(sequence.table.clear(), sequence.state)
            granted = self.allocate(self.pool.num_available, BlockState.RESERVED) or []
            if granted:  # whose holder writes before the step is executed
                self.sequences.append(Sequence([], BlockTable(BLOCK_SIZE, granted), BlockState.RESERVED))
        theirs = [self.contents[block] for block in granted]
        for block, slot in step.out:
            self.host[slot] = self.contents[block]
        for block, slot in step.back:
            self.contents[block] = self.host[slot]
        assert [self.contents[block] for block in granted] == theirs
        if not abort:
            for block, content in step.written.items():
                self.contents[block] = content
            self.sequences += step.coming
        for swapped in step.returning:
            if not abort:
                assert [self.contents[block] for block in step.coming[0].blocks] == swapped.contents
            self.space.release(swapped.slots)
        self.swapped += step.leaving
        self.release(step.claimed, BlockState.IN_FLIGHT)
        self.step = None

    @precondition(lambda self: self.swapped)
    @rule(number=PICK)
    def give_up_a_copy(self, number: int) -> None:
        swapped = self.swapped.pop(number % len(self.swapped))
        num_free, num_released = self.space.num_free, self.space.num_released_by(swapped.slots)
        self.space.release(swapped.slots)
        assert self.space.num_free == num_free + num_released

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

    @rule(block=st.integers(-1, 24), state=st.sampled_from(KINDS))
    def illegal_operations_raise(self, block: int, state: BlockState) -> None:
        inside = 0 <= block < self.pool.num_blocks
        if not inside or self.oracle.state_of(block) is BlockState.FREE:
            with pytest.raises(BlockError):
                self.pool.hold([block], state)
            with pytest.raises(BlockError):
                self.cache.insert([bytes(16)], [block])
        if not inside or not self.oracle.holds[block, state]:
            with pytest.raises(BlockError):
                self.pool.release([block], state)

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.oracle.now += 1
        self.pool.check_integrity()
        states = [self.oracle.state_of(block) for block in range(self.pool.num_blocks)]
        assert [self.pool.state_of(block) for block in range(self.pool.num_blocks)] == states
        assert self.pool.counts() == {state: states.count(state) for state in BlockState}
        assert self.cache.num_cached == len(self.oracle.nodes)
        assert self.cache.num_evictable == len(self.oracle.nodes.keys() - self.oracle.pinned())
        for block_hash, node in self.oracle.nodes.items():
            assert self.cache.block_of(block_hash) == node.block

    @invariant()
    def blocks_and_slots_contain_what_their_holders_rely_on(self) -> None:
        self.space.check_integrity()
        coming = {block for sequence in self.step.coming for block in sequence.blocks} if self.step else set()
        for sequence in self.sequences:
            for block, block_hash in zip(sequence.blocks, sequence.hashes, strict=False):
                assert self.contents[block] == block_hash
        for block_hash, node in self.oracle.nodes.items():
            assert node.block in coming or self.contents[node.block] == block_hash
        for swapped in self.swapped:
            assert [self.host[slot] for slot in swapped.slots] == swapped.contents
        in_use = self.swapped + (self.step.leaving + self.step.returning if self.step else [])
        assert {slot for swapped in in_use for slot in swapped.slots} == {
            slot for slot in range(self.space.num_slots) if self.space._num_holders[slot]
        }

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
TestPoolAndCache.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
