"""How a push is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import BlockPush
from kvrelay.handoff.transports.outbox import Copies, FrameSizes, Piece, cut, frame_blocks

pytestmark = pytest.mark.unit

NUM_BLOCKS = 1000
KIB = 1024
SIZES = FrameSizes()


def pieces_of(sources: list[int], block_bytes: int, sizes: FrameSizes = SIZES) -> list[Piece]:
    copies = [BlockPush(10 + i, source, 5000 - i) for i, source in enumerate(sources)]
    return list(cut("r", Copies.of(copies, NUM_BLOCKS), block_bytes, sizes))


def columns(copies: Copies) -> list[tuple[int, int, int]]:
    return list(zip(copies.indices.tolist(), copies.sources.tolist(), copies.slots.tolist(), strict=True))


def sources_of(pieces: list[Piece]) -> list[list[int]]:
    return [piece.copies.sources.tolist() for piece in pieces]


@given(
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=300),
    st.sampled_from([KIB, 16 * KIB, 64 * KIB, 300 * KIB, 2048 * KIB]),
)
def test_every_copy_is_in_one_piece_and_every_piece_fits(sources: list[int], block_bytes: int) -> None:
    pieces = pieces_of(sources, block_bytes)
    triples = sorted(triple for piece in pieces for triple in columns(piece.copies))
    assert triples == [(10 + i, source, 5000 - i) for i, source in enumerate(sources)]
    for piece in pieces:
        assert 1 <= len(piece.copies) <= frame_blocks(block_bytes, SIZES)
        if piece.direct:
            assert (np.diff(piece.copies.sources) == 1).all(), "a direct piece is one run of the pool"


def test_scattered_blocks_are_gathered_by_the_frame() -> None:
    pieces = pieces_of(list(range(0, 400, 2)), 16 * KIB)
    assert [len(piece.copies) for piece in pieces] == [64, 64, 64, 8]
    assert not any(piece.direct for piece in pieces)


def test_long_runs_go_directly_and_short_ones_are_gathered() -> None:
    run = list(range(100, 116))  # 256 KiB
    pieces = pieces_of([5, *reversed(run), 7, 200, 201], 16 * KIB)
    assert [(piece.direct, piece.copies.sources.tolist()) for piece in pieces] == [
        (True, run),
        (False, [5, 7, 200, 201]),
    ]


def test_a_push_that_is_one_run_goes_directly_however_short() -> None:
    [piece] = pieces_of([8, 7], KIB)
    assert piece.direct
    assert piece.copies.sources.tolist() == [7, 8]


def test_a_long_run_is_cut_into_frames() -> None:
    assert [len(piece.copies) for piece in pieces_of(list(range(150)), 16 * KIB)] == [64, 64, 22]


def test_blocks_larger_than_a_frame_go_one_by_one() -> None:
    assert sources_of(pieces_of([3, 9, 4], 2048 * KIB)) == [[3], [4], [9]]


@pytest.mark.parametrize(
    "copy", [BlockPush(0, NUM_BLOCKS, 0), BlockPush(0, -1, 0), BlockPush(-1, 0, 0), BlockPush(0, 0, 1 << 32)]
)
def test_numbers_out_of_range_are_refused(copy: BlockPush) -> None:
    with pytest.raises(ValueError, match="block"):
        Copies.of([BlockPush(0, 0, 0), copy], NUM_BLOCKS)
