"""JSON that is parsed in slices, compared with a parser that takes it at once."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay_router import loop_share
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


BLANKS = st.text(st.sampled_from(" \t\r\n"), max_size=12)
AROUND = [  # an item in arrays and objects
    ("[", "]"),
    ("[1,", "]"),
    ("[", ",{}]"),
    ('{"a":', "}"),
    ('{"a\\"\\\\":', ',"b":1}'),
    ('{"\\u00e9,[":[2],"a":', "}"),
    ('{"a":1,"a":', ',"b":2,"a":3}'),
]


def sliced(text: bytes, slice_bytes: int, window_bytes: int) -> Any:
    slices = load_in_slices(text, slice_bytes, window_bytes)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def check_equal(text: bytes, slice_bytes: int, window_bytes: int) -> None:
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(InvalidJson):
            sliced(text, slice_bytes, window_bytes)
    else:
        assert repr(sliced(text, slice_bytes, window_bytes)) == repr(expected)


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
    check_equal(text, slice_bytes, window_bytes)


@settings(max_examples=examples(400))
@given(value=VALUES, data=st.data(), slice_bytes=SIZES, window_bytes=SIZES)
def test_levels_and_blanks_give_what_the_whole_text_gives(
    value: Any, data: st.DataObject, slice_bytes: int, window_bytes: int
) -> None:
    separators = [data.draw(BLANKS) + mark + data.draw(BLANKS) for mark in ",:"]
    text = json.dumps(value, separators=(separators[0], separators[1]))
    for before, after in data.draw(st.lists(st.sampled_from(AROUND), max_size=20)):
        text = before + data.draw(BLANKS) + text + data.draw(BLANKS) + after
    check_equal((data.draw(BLANKS) + text + data.draw(BLANKS)).encode(), slice_bytes, window_bytes)


@settings(max_examples=examples(200))
@given(item=st.sampled_from(["[1,2,3,4,5]", "7", '"x,y"', "", "   "]), data=st.data(), slice_bytes=SIZES)
def test_only_blanks_of_json_are_taken(item: str, data: st.DataObject, slice_bytes: int) -> None:
    form = data.draw(st.sampled_from(["{_'aa'_:_I_,_'bb'_:_I_}", "[_I_,_[_I_]_,_I_]", "_{_'a'_:_I_}_", "[_[_I_]_I_]"]))
    pieces = form.replace("'", '"').replace("I", item).split("_")
    marks = st.sampled_from(["", "", "", " ", "\n", "\f", "\v", "\x00", "\u00a0", "\u2028"])
    text = pieces[0] + "".join(data.draw(marks) + piece for piece in pieces[1:])
    check_equal(text.encode(), slice_bytes, 16)


def test_the_reason_names_the_place_in_the_text() -> None:
    text = b"[" + b"1," * 499 + b"x,1,1,1,1,1,1]"
    with pytest.raises(InvalidJson) as error:
        sliced(text, 16, 64)
    place = re.search(r", in bytes (\d+) to (\d+)$", str(error.value))
    assert place and int(place[1]) <= text.index(b"x") < int(place[2])


@pytest.mark.parametrize("levels", [[b"["] * 126, [b'{"a":', b"["] * 63], ids=["arrays", "objects and arrays"])
def test_levels_take_no_memory_of_their_own(levels: list[bytes]) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}
    text = b"".join(levels) + b"1," * (1 << 19) + b"1" + b"".join(closing[level] for level in reversed(levels))
    tracemalloc.start()
    value = sliced(text, 1 << 14, 1 << 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for level in levels:
        value = value[0] if level == b"[" else value["a"]
        if value == 1:
            break
    assert peak < 8 * len(text), "the list of numbers itself is 4 times as large as their text"


async def test_large_texts_are_parsed_one_at_a_time_in_order_and_small_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_share, "SLICE_S", 0.0)  # other callbacks run after each slice
    finished: list[str] = []

    async def load(name: str, text: bytes) -> None:
        try:
            await load_json(text)
        finally:
            finished.append(name)

    def large(times: int) -> bytes:
        return b'["' + b"x" * LARGE_BYTES + b'"' + b",1" * LARGE_BYTES * times + b"]"

    texts = {"long": large(4), "cancelled": large(1), "invalid": large(2) + b",", "short": large(1), "small": b"[1]"}
    tasks = {name: asyncio.create_task(load(name, text)) for name, text in texts.items()}
    await tasks["small"]
    assert finished == ["small"]
    tasks["cancelled"].cancel()
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert [type(result).__name__ for result in results] == [
        "NoneType",
        "CancelledError",
        "InvalidJson",
        "NoneType",
        "NoneType",
    ]
    assert finished == ["small", "cancelled", "long", "invalid", "short"]


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
