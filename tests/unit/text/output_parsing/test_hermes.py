"""Calls as JSON in tags: Hermes, Qwen 2.5, Qwen 3."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.text.output_parsing.json_calls import HermesParser
from kvrelay.text.output_parsing.text_parser import MAX_HEAD_CHARS
from tests.fakes.parsed_output import all_text_of, calls_of, check_splits, content_of, parsed
from tests.thoroughness import examples

pytestmark = pytest.mark.unit

ARGUMENTS: Any = {"city": 'Zürich "HB" </tool_call>\\', "tags": ["🦦", {}, [1.5e3, None]], "o": {"}": "{"}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_content_and_parallel_calls() -> None:
    text = f"I will look.\n\n{call('weather', TEXT)}\n{call('time', '{}')}"
    events = check_splits(HermesParser, text)
    assert content_of(events) == "I will look."
    assert calls_of(events) == [("weather", TEXT), ("time", "{}")]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "parameters": {"a": [1, 2]}}', '{"a": [1, 2]}'),
        ('{"id": "x", "name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}", "type": "function"}', '{"a": "é"}'),
        ('{"name": "f", "arguments": {"a": \'x\'}}', "{\"a\": 'x'}"),
    ],
)
def test_forms_of_a_call(written: str, arguments: str) -> None:
    events = check_splits(HermesParser, f"<tool_call>{written}</tool_call>")
    assert calls_of(events) == [("f", arguments)] and content_of(events) == ""


@pytest.mark.parametrize(
    "text",
    [
        "a < b <tool",
        "  no call here \n",
        "<tool_call> hello </tool_call> there",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call> x',
        '<tool_call>{"name": "f',
        '<tool_call>{"name" "f"}</tool_call>',
        "<tool_call>{}</tool_call>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    events = check_splits(HermesParser, text)
    assert calls_of(events) == [] and content_of(events) == text


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    events = check_splits(HermesParser, f"<tool_call>{{oops</tool_call>{call('f', '{}')}")
    assert calls_of(events) == [("f", "{}")] and content_of(events) == "<tool_call>{oops</tool_call>"


def test_arguments_without_an_end_stop_at_the_end_of_the_call() -> None:
    events = check_splits(HermesParser, '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call> and then')
    assert calls_of(events) == [("f", '{"a": [1')]
    assert content_of(events) == "</tool_call> and then"


def test_text_behind_the_arguments_is_kept() -> None:
    events = check_splits(HermesParser, '<tool_call>{"name": "f", "arguments": {}} etc. </tool_call>.')
    assert calls_of(events) == [("f", "{}")] and "etc. </tool_call>." in content_of(events)


def test_a_cut_call_has_the_arguments_so_far() -> None:
    text = call("f", TEXT)
    for end in range(text.index("arguments"), len(text)):
        events = check_splits(HermesParser, text[:end]) if end % 16 == 0 else parsed(HermesParser, [text[:end]])
        ((name, arguments),) = calls_of(events)
        assert name == "f" and TEXT.startswith(arguments) and content_of(events) == ""


def test_a_call_whose_name_comes_too_late_is_content() -> None:
    text = '<tool_call>{"arguments": "' + "x" * MAX_HEAD_CHARS + '", "name": "f"}</tool_call>'
    whole = parsed(HermesParser, [text])
    assert content_of(whole) == text
    assert parsed(HermesParser, [text[at : at + 1000] for at in range(0, len(text), 1000)]) == whole


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '"name"', "{", "}", '"', ":", ",", "\\"]
PIECES += [" ", "\n", "[", "]", "null", "1", "é🦦", "<", "tool_call", '"arguments"', "x"]


@settings(max_examples=examples(500))
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_survives_in_any_pieces(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = parsed(HermesParser, [text[start:end] for start, end in itertools.pairwise(edges)])
    assert events == parsed(HermesParser, [text])
    kept = all_text_of(events)
    if not calls_of(events):
        assert kept == text
    for char in "é🦦":  # is neither structure nor whitespace, so it is never lost
        if "name" not in text and "arguments" not in text:
            assert kept.count(char) == text.count(char)


def test_whitespace_without_end_is_kept_at_its_place() -> None:
    """Models get into such loops. The work for each piece must not grow with what is withheld."""
    parser, pieces = HermesParser(), ["I", *["\n" * 8] * 200_000, "saw"]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert content_of(events) == "".join(pieces)
