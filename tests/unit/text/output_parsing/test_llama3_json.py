"""Calls as JSON without tags: Llama 3.1 to 3.3."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.json_calls import Llama3JsonParser
from tests.fakes.parsed_output import all_text_of, calls_of, check_splits, content_of, parsed
from tests.thoroughness import examples

pytestmark = pytest.mark.unit
TAG = Llama3JsonParser.tag

ARGUMENTS: Any = {"city": f'Zürich "HB" {TAG}; \\', "tags": ["🦦", {}, [1.5e3, None]], "o": {"}": "{"}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def new_parser() -> Llama3JsonParser:
    return Llama3JsonParser([Tool(name="f"), Tool(name="weather")])


def call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize("before", ["", " \n", TAG, f"\n{TAG} "])
@pytest.mark.parametrize("between", ["; ", ";", "\n", TAG, f"; {TAG}"])
def test_parallel_calls(before: str, between: str) -> None:
    events = check_splits(new_parser, before + call("weather", TEXT) + between + call("f", "{}"))
    assert calls_of(events) == [("weather", TEXT), ("f", "{}")]
    assert content_of(events) == (";" if between == f"; {TAG}" else "")


def test_content_in_front_of_a_tag() -> None:
    events = check_splits(new_parser, f"I will look. {TAG}{call('f', TEXT)}")
    assert calls_of(events) == [("f", TEXT)] and content_of(events) == "I will look."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  hello {there} \n",
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        f'{TAG}{{"name": "Bob", "parameters": {{}}}} x',
        f"{TAG}import os; print(1)",
        "{oops",
        '{"name": "f',
        f"I call {call('f', '{}')}",
        "<|python_ta",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    events = check_splits(new_parser, text)
    assert calls_of(events) == [] and content_of(events) == text


def test_text_behind_a_call_is_content() -> None:
    events = check_splits(new_parser, call("f", "{}") + " Done; é")
    assert calls_of(events) == [("f", "{}")] and content_of(events) == " Done; é"


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    events = check_splits(new_parser, f'{{"name": "f", "parameters": {{"a": [1{TAG}{call("f", TEXT)}')
    assert calls_of(events) == [("f", '{"a": [1'), ("f", TEXT)] and content_of(events) == ""


def test_a_cut_call_has_the_arguments_so_far() -> None:
    text = call("f", TEXT)
    for end in range(text.index("parameters"), len(text)):
        ((name, arguments),) = calls_of(parsed(new_parser, [text[:end]]))
        assert name == "f" and (TEXT.startswith(arguments))


PIECES = [TAG, '{"name": "f", "parameters": ', '"name"', "{", "}", '"', ":", ",", "\\", ";", " ", "\n", "[", "]"]
PIECES += ["null", "1", "é🦦", "<", "<|python", '"parameters"', call("f", "{}"), "x"]


@settings(max_examples=examples(500))
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_survives_in_any_pieces(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = parsed(new_parser, [text[start:end] for start, end in itertools.pairwise(edges)])
    assert events == parsed(new_parser, [text])
    if not calls_of(events):
        assert all_text_of(events) == text
