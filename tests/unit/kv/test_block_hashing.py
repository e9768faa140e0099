"""Block hashes: a hash names a prefix, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.hashing import HASH_BYTES, hash_blocks, root_hash

ROOT = root_hash(model="m")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_are_hashed(tokens: list[int], block_size: int) -> None:
    hashes = hash_blocks(ROOT, tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(TOKENS, st.integers(1, 9), st.data())
def test_a_chain_can_be_hashed_in_pieces(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    whole = hash_blocks(ROOT, tokens, block_size)
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + hash_blocks(parent, tokens[cut * block_size :], block_size) == whole


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 5), st.data())
def test_chains_agree_up_to_the_first_block_that_differs(tokens: list[int], size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    pairs = list(zip(hash_blocks(ROOT, tokens, size), hash_blocks(ROOT, other, size), strict=True))
    assert [one == two for one, two in pairs] == [index < position // size for index in range(len(pairs))]


def test_arrays_and_lists_of_tokens_hash_alike() -> None:
    tokens = [7, 0, 2**31 - 1, 3]
    expected = hash_blocks(ROOT, tokens, 2)
    for dtype in (np.int32, np.int64, ">i4"):
        assert hash_blocks(ROOT, np.array(tokens, dtype), 2) == expected
    assert hash_blocks(ROOT, np.repeat(np.array(tokens, np.int32), 2)[::2], 2) == expected


def test_hashes_stay_the_same_between_releases() -> None:
    # Workers of neighbouring versions share an index: a change of these values needs a new protocol version.
    assert root_hash(model="m", numerics="a", cache_salt="s").hex() == "351ee881f6df54c872c2139fc959e628"
    assert hash_blocks(bytes(16), [1, 2, 3, 4], 4)[0].hex() == "f23680cf9d0cdff61c7fe464c491f63b"


PARTS = st.text(max_size=3)


@given(st.tuples(PARTS, PARTS, PARTS), st.tuples(PARTS, PARTS, PARTS))
def test_roots_differ_unless_every_part_agrees(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    roots = [root_hash(model=model, numerics=numerics, cache_salt=salt) for model, numerics, salt in (one, two)]
    assert (roots[0] == roots[1]) == (one == two)


def test_parts_of_a_root_do_not_run_into_each_other() -> None:
    splits = [("ab", "", ""), ("a", "b", ""), ("a", "", "b"), ("", "ab", ""), ("", "a", "b"), ("", "", "ab")]
    assert len({root_hash(model=model, numerics=numerics, cache_salt=salt) for model, numerics, salt in splits}) == 6


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_beyond_int32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks(ROOT, [token], 1)


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks(ROOT, [1, 2], 0)
