"""Calls as JSON, in tags (Hermes, Qwen 2.5, Qwen 3) and without (Llama 3.1 to 3.3)."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.json_calls import HermesParser, Llama3JsonParser
from kvrelay.text.output_parsing.parser_base import MAX_HEAD_CHARS
from tests.fakes.parsed_output import calls_of, check_splits, content_of, parsed

LARGEST, OTTER = sys.float_info.max, "\\ud83e\\udda6"
TAG = Llama3JsonParser.tag

ARGUMENTS: Any = {"city": f'Zürich "HB" </tool_call>{TAG}; \\', "tags": ["🦦", {}, [1.5e3, None]], "o": {"}": "{"}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama() -> Llama3JsonParser:
    return Llama3JsonParser([Tool(name="f"), Tool(name="weather")])


def bare(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "parameters": {"a": [1, 2]}}', '{"a": [1, 2]}'),
        ('{"id": "x", "name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}", "type": "function"}', '{"a": "é"}'),
        ('{"name": "f", "arguments": "{\\"a\\": [1]}"}', '{"a": [1]}'),
        (f'{{"name": "f", "arguments": {{"a": "{OTTER}{OTTER[6:]}{OTTER}"}}}}', f'{{"a": "{OTTER}?{OTTER}"}}'),
        ('{"name": "f", "arguments": {"a": [1e999, -1e999]}}', f'{{"a": [{LARGEST}, -{LARGEST}]}}'),
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
    events = check_splits(HermesParser, f"<tool_call>{{oops</tool_call>{tagged('f', '{}')}")
    assert calls_of(events) == [("f", "{}")] and content_of(events) == "<tool_call>{oops</tool_call>"


def test_a_call_whose_name_comes_too_late_is_content() -> None:
    text = '<tool_call>{"arguments": "' + "x" * MAX_HEAD_CHARS + '", "name": "f"}</tool_call>'
    whole = parsed(HermesParser, [text])
    assert content_of(whole) == text
    assert parsed(HermesParser, [text[at : at + 1000] for at in range(0, len(text), 1000)]) == whole


def test_whitespace_without_end_is_kept_at_its_place() -> None:
    """Models get into such loops. The work for each piece must not grow with what is withheld."""
    parser, pieces = HermesParser(), ["I", *["\n" * 8] * 200_000, "saw"]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert content_of(events) == "".join(pieces)


@pytest.mark.parametrize("before", ["", " \n", TAG, f"\n{TAG} "])
@pytest.mark.parametrize("between", ["; ", ";", "\n", TAG, f"; {TAG}"])
def test_parallel_calls(before: str, between: str) -> None:
    events = check_splits(llama, before + bare("weather", TEXT) + between + bare("f", "{}"))
    assert calls_of(events) == [("weather", TEXT), ("f", "{}")]
    assert content_of(events) == (";" if between == f"; {TAG}" else "")


def test_content_in_front_of_a_tag() -> None:
    events = check_splits(llama, f"I will look. {TAG}{bare('f', TEXT)}")
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
        f"I call {bare('f', '{}')}",
        "<|python_ta",
    ],
)
def test_what_is_no_call_is_content_without_tags(text: str) -> None:
    events = check_splits(llama, text)
    assert calls_of(events) == [] and content_of(events) == text


def test_text_behind_a_call_without_tags_is_content() -> None:
    events = check_splits(llama, bare("f", "{}") + " Done; é")
    assert calls_of(events) == [("f", "{}")] and content_of(events) == " Done; é"


def test_behind_a_malformed_call_without_an_end_all_is_content() -> None:
    text = f'{{"name": "f", "parameters": {{"a": [1{TAG}{bare("f", TEXT)}'
    events = check_splits(llama, text)
    assert calls_of(events) == [] and content_of(events) == text
