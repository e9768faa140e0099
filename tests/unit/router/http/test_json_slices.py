"""JSON that is parsed in slices, compared with a parser that takes it at once."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay_router.http.json_slices import LARGE_BYTES, MAX_DEPTH, MAX_PARTS, InvalidJson, load_in_slices, load_json
from tests.thoroughness import examples

TEXTS = st.text(st.sampled_from('a",\\[]{}: \n\u00e9'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)
SIZES = st.integers(1, 24)
TOKENS = [b'"', b",", b"\\", b"[", b"]", b"{", b"}", b":", b" ", b"1", b"\xff"]


def sliced(text: bytes, slice_bytes: int, window_bytes: int) -> Any:
    slices = load_in_slices(text, slice_bytes, window_bytes)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


@settings(max_examples=examples(400))
@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), slice_bytes=SIZES, window_bytes=SIZES)
def test_slices_give_what_the_whole_text_gives(
    value: Any, indent: int | None, is_ascii: bool, slice_bytes: int, window_bytes: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode()
    found = sliced(text, slice_bytes, window_bytes)
    assert repr(found) == repr(orjson.loads(text)), "also the order of keys"


@settings(max_examples=examples(800))
@given(value=VALUES, data=st.data(), slice_bytes=SIZES, window_bytes=SIZES)
def test_what_is_no_json_is_none_in_slices(
    value: Any, data: st.DataObject, slice_bytes: int, window_bytes: int
) -> None:
    text = json.dumps(value).encode()
    place = data.draw(st.integers(0, len(text)))
    text = text[:place] + data.draw(st.sampled_from(TOKENS)) + text[place + data.draw(st.integers(0, 1)) :]
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(InvalidJson):
            sliced(text, slice_bytes, window_bytes)
    else:
        assert repr(sliced(text, slice_bytes, window_bytes)) == repr(expected)


async def test_large_texts_have_bounded_parts_and_levels() -> None:
    for text, reason in (
        (b"[" + b"{}," * MAX_PARTS + b"{}]", "strings, arrays and objects"),
        (b"[" + b'"",' * MAX_PARTS + b'""]', "strings, arrays and objects"),
        (b'["' + b"x" * LARGE_BYTES + b'",' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]", "128 levels"),
    ):
        with pytest.raises(InvalidJson, match=reason):
            await load_json(text)
    whole = b'["' + b"x" * LARGE_BYTES + b'",' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"]"
    assert await load_json(whole) == orjson.loads(whole)
    numbers = b"[" + b"1," * MAX_PARTS + b"1]"
    assert await load_json(numbers) == [1] * (MAX_PARTS + 1), "numbers are not counted"
