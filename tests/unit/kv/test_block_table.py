"""Block tables: order, growth, and views that never change under a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.table import BlockTable, blocks_for


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
