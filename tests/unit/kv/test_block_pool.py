"""The block pool and its runs of free blocks: illegal calls, allocation, copy-on-write; and block tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.cache import BlockError, IntegrityError, OutOfBlocks
from kvrelay.kv.free_runs import FreeRuns
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable, blocks_for, copy_on_write
from tests.unit.kv.cache_oracle import KINDS

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


# -- runs of free blocks, against a plain set ------------------------------------------------------------------------


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """Maximal runs of neighbours, (start, length)."""
    starts = sorted(block for block in free if block - 1 not in free)
    return [(start, next(n for n in range(1, len(free) + 2) if start + n not in free)) for start in starts]


@given(st.integers(0, 40), st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_histories_match_a_set(num_blocks: int, random, num_operations: int) -> None:  # type: ignore[no-untyped-def]
    runs = FreeRuns(num_blocks)
    free = set(range(num_blocks))
    used: list[int] = []
    for _ in range(num_operations):
        if random.random() < 0.5:
            taken = runs.take(random.randint(0, len(free)))
            assert len(set(taken)) == len(taken) and free.issuperset(taken)
            free -= set(taken)
            used += taken
        elif used and random.random() < 0.3:
            after = random.choice(used)
            taken = runs.take_at(after + 1, random.randint(0, 4))
            assert taken == [block for block in range(after + 1, after + 1 + len(taken)) if block in free]
            free -= set(taken)
            used += taken
        elif random.random() < 0.3:
            named = random.sample(sorted(free), random.randint(0, len(free)))
            runs.take_named(named)
            free -= set(named)
            used += named
        else:
            random.shuffle(used)
            cut = random.randint(0, len(used))
            runs.give_back(used[cut:])
            free |= set(used[cut:])
            del used[cut:]
        assert runs.check_integrity() == free
        assert runs.num_free == len(free)
        assert runs.runs() == runs_of(free)


def test_one_run_is_taken_where_one_fits() -> None:
    runs = FreeRuns(64)
    runs.take(64)
    runs.give_back([*range(3), *range(10, 18), *range(30, 62)])
    assert runs.take(8) == list(range(10, 18))
    assert runs.take(20) == list(range(30, 50))


def test_single_blocks_fill_the_smallest_gaps() -> None:
    runs = FreeRuns(32)
    runs.take(32)
    runs.give_back([5, *range(10, 20), 25])
    assert sorted(runs.take(1) + runs.take(1)) == [5, 25]


def test_few_runs_are_used_where_none_fits() -> None:
    runs = FreeRuns(32)
    runs.take(32)
    runs.give_back([1, 3, *range(5, 9), *range(12, 28)])
    assert runs.take(20) == [*range(12, 28), *range(5, 9)]


# -- block tables ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 130))
def test_blocks_for_is_the_smallest_number_that_suffices(num_tokens: int, block_size: int) -> None:
    num_blocks = blocks_for(num_tokens, block_size)
    assert num_blocks * block_size >= num_tokens > (num_blocks - 1) * block_size or num_tokens == num_blocks == 0


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=12))
def test_blocks_stay_in_order(pieces: list[list[int]]) -> None:
    table = BlockTable(16)
    for piece in pieces:
        table.append(piece)
    everything = [block for piece in pieces for block in piece]
    assert table.ids.tolist() == everything
    assert table.ids.dtype == np.int32
    assert table.num_blocks == len(everything)
    assert table.capacity_tokens == 16 * len(everything)


def test_a_view_never_changes() -> None:
    table = BlockTable(16, [1, 2, 3])
    view = table.ids
    table.append([4])
    table.replace(1, 9)
    assert table.truncate(1) == [9, 3, 4]
    table.append([5, 6])
    assert table.clear() == [1, 5, 6]
    table.append([7, 8])
    assert view.tolist() == [1, 2, 3]
    assert table.ids.tolist() == [7, 8]


def test_a_view_is_read_only_and_no_copy() -> None:
    table = BlockTable(16, [1, 2, 3])
    assert np.shares_memory(table.ids, table.ids)
    with pytest.raises(ValueError, match="read-only"):
        table.ids[0] = 5


def test_growth_by_one_copies_seldom() -> None:
    table = BlockTable(16)
    storages = set()
    for block in range(10_000):
        table.append([block])
        storages.add(table.ids.__array_interface__["data"][0])
    assert len(storages) < 20
    assert table.ids.tolist() == list(range(10_000))


@pytest.mark.parametrize("index", [-1, 2])
def test_only_blocks_in_the_table_can_be_replaced(index: int) -> None:
    table = BlockTable(16, [1, 2])
    with pytest.raises(IndexError):
        table.replace(index, 5)
    with pytest.raises(IndexError):
        table.truncate(3)
    assert table.ids.tolist() == [1, 2]


def test_the_last_block() -> None:
    table = BlockTable(16, [9, 3])
    assert (table.last, table.num_blocks, table.capacity_tokens) == (3, 2, 32)
    table.append([7])
    assert (table.last, table.num_blocks, table.capacity_tokens) == (7, 3, 48)
    table.clear()
    assert (table.num_blocks, table.capacity_tokens) == (0, 0)
    with pytest.raises(IndexError, match="no last block"):
        _ = table.last
