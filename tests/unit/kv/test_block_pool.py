"""The block pool: states, transactions, allocation, copy-on-write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.cache import BlockError, IntegrityError, OutOfBlocks
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable, CopyInstruction, copy_on_write, finish_copy
from tests.unit.kv.cache_oracle import KINDS


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(5, 16)
    assert pool.counts() == {state: 5 if state is BlockState.FREE else 0 for state in BlockState}
    assert pool.num_free == pool.num_available == 5
    pool.check_integrity()


def test_the_strongest_hold_is_the_label() -> None:
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1, KINDS[0])
    for kind in KINDS[1:]:
        pool.hold([block], kind)
        assert pool.state_of(block) is kind
        assert pool.counts()[kind] == 1
        assert sum(pool.counts().values()) == 3
    for weaker, kind in zip(reversed(KINDS[:-1]), reversed(KINDS), strict=False):
        pool.release([block], kind)
        assert pool.state_of(block) is weaker
        pool.check_integrity()
    pool.release([block], KINDS[0])
    assert pool.state_of(block) is BlockState.FREE


def test_a_block_is_free_only_after_its_last_hold() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2, BlockState.RUNNING)
    for _ in range(1000):
        pool.hold(blocks, BlockState.RUNNING)
    for _ in range(1000):
        pool.release(blocks, BlockState.RUNNING)
        assert pool.num_free == 0
    pool.release(blocks, BlockState.RUNNING)
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_move_changes_one_hold() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2, BlockState.RESERVED)
    pool.hold(blocks, BlockState.RESERVED)
    pool.move(blocks, BlockState.RESERVED, BlockState.RUNNING)
    assert [pool.num_holds(blocks[0], state) for state in (BlockState.RESERVED, BlockState.RUNNING)] == [1, 1]
    assert pool.counts()[BlockState.RESERVED] == 2
    pool.move(blocks, BlockState.RESERVED, BlockState.RUNNING)
    assert pool.counts()[BlockState.RUNNING] == 2
    pool.check_integrity()


def test_block_ids_may_come_as_an_array() -> None:
    pool = BlockPool(4, 16)
    table = BlockTable(16, pool.allocate(3, BlockState.COMPUTING))
    pool.move(table.ids, BlockState.COMPUTING, BlockState.RUNNING)
    pool.hold(table.ids, BlockState.IN_FLIGHT)
    pool.release(table.ids, BlockState.RUNNING)
    pool.release(table.ids, BlockState.IN_FLIGHT)
    assert pool.num_free == 4


ILLEGAL: dict[str, Callable[[BlockPool], object]] = {
    "hold a free block": lambda pool: pool.hold([0, 3], BlockState.RUNNING),
    "release a free block": lambda pool: pool.release([0, 3], BlockState.RUNNING),
    "release as another kind": lambda pool: pool.release([0, 1], BlockState.IN_FLIGHT),
    "release twice in one call": lambda pool: pool.release([0, 1, 0], BlockState.RUNNING),
    "move what is not held so": lambda pool: pool.move([1, 2], BlockState.RUNNING, BlockState.IN_FLIGHT),
    "move a free block": lambda pool: pool.move([0, 3], BlockState.RUNNING, BlockState.IN_FLIGHT),
    "a negative id": lambda pool: pool.hold([0, -1], BlockState.RUNNING),
    "an id beyond the pool": lambda pool: pool.release([0, 4], BlockState.RUNNING),
    "allocate too many": lambda pool: pool.allocate(2, BlockState.RUNNING),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_is_illegal_raises_and_changes_nothing(name: str) -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(2, BlockState.RUNNING) + pool.allocate(1, BlockState.RESERVED) == [0, 1, 2]
    pool.hold([0], BlockState.RUNNING)

    def state() -> object:
        return pool.counts(), pool.num_free, [[pool.num_holds(block, kind) for kind in KINDS] for block in range(4)]

    before = state()
    with pytest.raises(BlockError):
        ILLEGAL[name](pool)
    assert state() == before
    pool.check_integrity()


def test_a_double_free_raises() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2, BlockState.RUNNING)
    pool.release(blocks, BlockState.RUNNING)
    with pytest.raises(BlockError, match="not held as running"):
        pool.release(blocks, BlockState.RUNNING)
    assert pool.num_free == 4


@pytest.mark.parametrize("state", [BlockState.FREE, BlockState.CACHED])
def test_free_and_cached_are_no_holds(state: BlockState) -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2, BlockState.RUNNING)
    for operation in (
        lambda: pool.allocate(1, state),
        lambda: pool.hold(blocks, state),
        lambda: pool.release(blocks, state),
        lambda: pool.move(blocks, BlockState.RUNNING, state),
        lambda: pool.move(blocks, state, BlockState.RUNNING),
    ):
        with pytest.raises(ValueError, match="not a kind of hold"):
            operation()
    assert pool.counts()[BlockState.RUNNING] == 2


def test_too_large_an_allocation_says_what_there_is() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(1, BlockState.RUNNING)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(4, BlockState.RUNNING)
    assert (caught.value.needed, caught.value.available) == (4, 3)


def test_a_prompt_gets_neighbouring_blocks() -> None:
    pool = BlockPool(100, 16)
    first, second, third = (pool.allocate(count, BlockState.RUNNING) for count in (10, 30, 10))
    pool.release(second, BlockState.RUNNING)
    assert pool.allocate(30, BlockState.RUNNING) == second
    pool.release(first, BlockState.RUNNING)
    pool.release(third[::-1], BlockState.RUNNING)
    assert pool.allocate(60, BlockState.RUNNING) == list(range(40, 100))


def test_a_sequence_grows_into_its_neighbour() -> None:
    pool = BlockPool(100, 16)
    one = pool.allocate(3, BlockState.RUNNING)
    two = pool.allocate(3, BlockState.RUNNING)
    pool.release(one[:1], BlockState.RUNNING)
    assert pool.allocate(2, BlockState.RUNNING, after=two[-1]) == [6, 7]
    assert pool.allocate(1, BlockState.RUNNING, after=one[-1]) == [0]  # its neighbour is taken: the smallest gap
    pool.check_integrity()


def test_growing_behind_a_free_block_is_growing_anywhere() -> None:
    pool = BlockPool(8, 16)
    pool.allocate(8, BlockState.RUNNING)
    pool.release([3, 4], BlockState.RUNNING)
    pool.release([2], BlockState.RUNNING)  # 2 to 4 are one run now; what 3 said about itself is stale
    assert pool.allocate(1, BlockState.RUNNING, after=2) == [2]
    assert pool.allocate(1, BlockState.RUNNING, after=99) == [3]
    pool.check_integrity()


def test_nothing_is_allocated_for_nothing() -> None:
    pool = BlockPool(0, 16)
    assert pool.allocate(0, BlockState.RUNNING) == []
    pool.hold([], BlockState.RUNNING)
    pool.release(np.empty(0, np.int32), BlockState.RUNNING)
    pool.check_integrity()
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1, BlockState.RUNNING)


def test_lost_and_doubled_blocks_are_found() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2, BlockState.RUNNING)
    pool._holds[blocks[0]] = 0
    with pytest.raises(IntegrityError, match="block 0 counts as free"):
        pool.check_integrity()
    pool._holds[blocks[0]] = pool._holds[blocks[1]]
    pool.check_integrity()
    pool._holds[3] = pool._holds[blocks[1]]
    with pytest.raises(IntegrityError, match="block 3 counts as running"):
        pool.check_integrity()


def test_a_forked_block_is_copied_on_the_first_write() -> None:
    pool = BlockPool(8, 16)
    table = BlockTable(16, pool.allocate(3, BlockState.RUNNING))
    assert copy_on_write(pool, table, 2) is None
    fork = BlockTable(16, table.ids.tolist())
    pool.hold(fork.ids, BlockState.RUNNING)
    assert pool.is_shared(2)

    copy = copy_on_write(pool, fork, 2)
    assert copy == CopyInstruction(source=2, target=3, state=BlockState.RUNNING)
    assert table.ids.tolist() == [0, 1, 2]
    assert fork.ids.tolist() == [0, 1, 3]
    finish_copy(pool, copy)
    assert copy_on_write(pool, fork, 2) is None
    assert copy_on_write(pool, table, 2) is None
    pool.release(table.ids, BlockState.RUNNING)
    pool.release(fork.ids, BlockState.RUNNING)
    assert pool.num_free == 8


def test_the_source_of_a_copy_cannot_be_reused_before_the_copy_is_made() -> None:
    pool = BlockPool(2, 16)
    table = BlockTable(16, pool.allocate(1, BlockState.RUNNING))
    fork = BlockTable(16, table.ids.tolist())
    pool.hold(fork.ids, BlockState.RUNNING)
    copy = copy_on_write(pool, fork, 0)
    assert copy is not None
    pool.release(table.ids, BlockState.RUNNING)  # the other sequence ends first
    with pytest.raises(OutOfBlocks):
        pool.allocate(1, BlockState.RESERVED)
    finish_copy(pool, copy)
    assert pool.allocate(1, BlockState.RESERVED) == [copy.source]


def test_copy_on_write_without_room_changes_nothing() -> None:
    pool = BlockPool(1, 16)
    table = BlockTable(16, pool.allocate(1, BlockState.RUNNING))
    pool.hold(table.ids, BlockState.RUNNING)
    with pytest.raises(OutOfBlocks):
        copy_on_write(pool, table, 0)
    assert table.ids.tolist() == [0]
    assert pool.num_holds(0) == 2


def test_blocks_for_many_are_the_free_neighbours_of_their_last_ones() -> None:
    pool = BlockPool(16, 16)
    first, second = pool.allocate(2, BlockState.RUNNING), pool.allocate(2, BlockState.RUNNING)
    assert (first, second) == ([0, 1], [2, 3])
    assert pool.allocate_each([3, 1, 3], BlockState.RUNNING) == [4, 5, 6]  # behind 1 and 4 somebody is already
    assert pool.counts()[BlockState.RUNNING] == 7
    pool.check_integrity()


def test_blocks_for_many_come_from_the_cache_where_none_is_free() -> None:
    pool = BlockPool(8, 16)
    cache = PrefixCache(pool)
    kept = pool.allocate(8, BlockState.RUNNING)
    cache.insert([bytes([number]) * 16 for number in range(6)], kept[:6])
    pool.release(kept[:6], BlockState.RUNNING)
    with pytest.raises(OutOfBlocks):
        pool.allocate_each([7] * 7, BlockState.RUNNING)
    assert (pool.num_free, cache.num_cached) == (0, 6)
    taken = pool.allocate_each([6, 4, 2, 2], BlockState.RUNNING)  # evicted are 5, 4, 3 and 2
    assert taken == [2, 5, 3, 4]
    assert cache.num_cached == 2
    pool.check_integrity()


@given(st.lists(st.integers(0, 31), min_size=0, max_size=12), st.integers(0, 16), st.integers(0, 8))
def test_blocks_for_many_are_as_many_new_ones(after: list[int], num_cached: int, num_held: int) -> None:
    pool = BlockPool(32, 16)
    cache = PrefixCache(pool)
    chain = pool.allocate(num_cached, BlockState.RUNNING)
    held = pool.allocate(num_held, BlockState.RUNNING)
    cache.insert([number.to_bytes(16, "little") for number in range(num_cached)], chain)
    pool.release(chain, BlockState.RUNNING)
    taken = pool.allocate_each(after, BlockState.COMPUTING)
    assert len(taken) == len(set(taken)) == len(after)
    assert not set(taken) & set(held)
    assert {pool.state_of(block) for block in taken} <= {BlockState.COMPUTING}
    pool.check_integrity()
