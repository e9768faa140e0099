"""Parts of blocks as runs of bytes, against the bytes that a part names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy

pytestmark = pytest.mark.unit


@st.composite
def block_parts(draw: st.DrawFn, num_rows: int, num_bytes: int) -> BlockPart:
    block_rows = num_rows + draw(st.integers(0, 3))
    row_bytes = num_bytes + draw(st.integers(0, 3))
    first_row = draw(st.integers(0, block_rows - num_rows))
    first_byte = draw(st.integers(0, row_bytes - num_bytes))
    return BlockPart(block_rows, row_bytes, first_row, num_rows, first_byte, num_bytes)


@st.composite
def part_copies(draw: st.DrawFn) -> PartCopy:
    size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return PartCopy(0, draw(block_parts(*size)), draw(block_parts(*size)))


def bytes_of(part: BlockPart) -> list[int]:
    """The places of a part's bytes in its block, in the order of the copy."""
    places = np.arange(part.block_bytes).reshape(part.block_rows, part.row_bytes)
    rows = places[part.first_row : part.first_row + part.num_rows]
    chosen: list[int] = rows[:, part.first_byte : part.first_byte + part.num_bytes].ravel().tolist()
    return chosen


@given(part_copies())
def test_runs_copy_the_bytes_of_the_part_in_their_order(copy: PartCopy) -> None:
    source, target = copy.runs()
    assert (source.num_rows, source.num_bytes) == (target.num_rows, target.num_bytes)
    assert (bytes_of(source), bytes_of(target)) == (bytes_of(copy.source), bytes_of(copy.target))
    assert (source.block_bytes, target.block_bytes) == (copy.source.block_bytes, copy.target.block_bytes)


@given(part_copies())
def test_there_is_one_run_where_both_sides_have_one(copy: PartCopy) -> None:
    def is_run(part: BlockPart) -> bool:
        return set(np.diff(bytes_of(part)).tolist()) <= {1}

    num_runs = copy.runs()[0].num_rows
    if is_run(copy.source) and is_run(copy.target) and copy.source.num_rows > 1:
        assert num_runs == 1
    else:
        assert num_runs == copy.source.num_rows
