"""Outputs of models whose tokenizer has a `response_template`."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.text.output_parsing.dialect import TemplateDialect, UnknownParser, find_dialect
from kvrelay.text.output_parsing.events import OutputParser, Tool
from tests.fakes.call_families import TOOLS
from tests.fakes.parsed_output import calls_of, check_splits, content_of, parsed, reasoning_of
from tests.thoroughness import examples

FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
ENDS = {"close": ["<|im_end|>", "<|endoftext|>"]}
JSON_CALLS: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
        "content": ENDS,
    },
}
XML_CALLS: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call name=(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": NAMED,
        },
        "content": ENDS,
    },
}
PARALLEL: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "[CALLS]",
            "close": "[/CALLS]",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
HARD = {"city": 'Zürich "HB" \\ {x} 🦦\n', "tags": ["a\"b'", {"deep": [1.5, None]}]}


def dialect_of(spec: Any) -> TemplateDialect:
    dialect = find_dialect("template", "auto", None, spec, ["<|im_start|>", "<|im_end|>", "<|pad|>"])
    assert isinstance(dialect, TemplateDialect)
    return dialect


def parser_of(spec: Any, *, prompt_end: str = "", tools: Any = TOOLS) -> OutputParser:
    return dialect_of(spec).new_parser(tools, begins_inside=False, prompt_end=prompt_end)


def json_call(name: str, arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</call>"


def test_reasoning_content_and_parallel_calls_in_any_pieces() -> None:
    text = f"<think>\nHm 🦦 </think>\n\nI look.\n{json_call('weather', HARD)}\n{json_call('now', {})}<|im_end|>"
    events = check_splits(lambda: parser_of(JSON_CALLS), text)
    assert reasoning_of(events) == "Hm 🦦" and content_of(events) == "I look."
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == [("weather", HARD), ("now", {})]


def test_values_that_a_model_writes_as_text_get_the_types_of_the_schema() -> None:
    tool = Tool(name="f", parameters={"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    text = "<call name=f><n>7</n><s>7 🦦</s><other>[1]</other></call>"
    events = check_splits(lambda: parser_of(XML_CALLS, tools=[tool]), text)
    assert calls_of(events) == [("f", '{"n": 7, "s": "7 🦦", "other": [1]}')]


def test_one_region_may_have_several_calls() -> None:
    calls = [{"name": "weather", "arguments": HARD}, {"name": "now", "arguments": {}}]
    events = check_splits(lambda: parser_of(PARALLEL), f"So: [CALLS]{json.dumps(calls)}[/CALLS]")
    assert [name for name, _ in calls_of(events)] == ["weather", "now"] and content_of(events) == "So:"


@pytest.mark.parametrize(
    "text",
    [
        "An otter <b> is\n\na mammal",
        'So <call>{"name": "weather", </call>',
        "<call>no call 🦦</call>",
        '<call>{"arguments": {}}</call>',
        '<call>{"name": 7}</call>',
        '<call>{"name": "weather", "arguments": {"a": NaN}}</call>',
        '<call>{"name": "weath',
        "<call>",
        "<cal",
    ],
)
def test_no_text_of_a_malformed_call_is_lost(text: str) -> None:
    events = check_splits(lambda: parser_of(JSON_CALLS), text)
    assert calls_of(events) == []
    assert content_of(events).replace("</call>", "") == text.replace("</call>", "")


def test_without_tools_calls_are_content() -> None:
    call = json_call("weather", {})
    assert content_of(check_splits(lambda: parser_of(JSON_CALLS, tools=[]), call)) == call


def test_the_prompt_may_have_begun_the_message() -> None:
    opened = parsed(
        lambda: parser_of(JSON_CALLS, prompt_end="x<|im_end|>\n<|im_start|>assistant\n<think>\n"), ["Hm</think>yes"]
    )
    assert reasoning_of(opened) == "Hm" and content_of(opened) == "yes"
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert content_of(parsed(lambda: parser_of(JSON_CALLS, prompt_end=closed), ["yes"])) == "yes"
    # The end of a prompt may be that of a long message, which is none of the output.
    assert content_of(parsed(lambda: parser_of(JSON_CALLS, prompt_end="of a text <think>"), ["yes"])) == "yes"


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_text_survives_in_any_pieces(data: st.DataObject) -> None:
    pieces = ["<call>", "</call>", "{", "}", '"name": ', '"weather"', "🦦", " ", "\n", "<", "x", json_call("now", {})]
    pieces += [', "arguments": ', "[1]", '"{}"']
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=16)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole = parsed(lambda: parser_of(JSON_CALLS), [text])
    cut = [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]
    assert parsed(lambda: parser_of(JSON_CALLS), cut) == whole == parsed(lambda: parser_of(JSON_CALLS), list(text))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(whole))
    if '"name"' not in text:
        assert content_of(whole).count("🦦") == text.count("🦦")


def test_parsers_see_the_special_tokens_that_the_template_names() -> None:
    assert dialect_of(JSON_CALLS).markers == ("<|im_start|>", "<|im_end|>")
    escaped = {**PARALLEL, "fields": {"content": {"close_pattern": r"<\|pad\|>"}}}
    dialect = dialect_of(escaped)
    assert dialect.markers == ("<|im_start|>", "<|pad|>") and not dialect.calls_tools


def test_auto_takes_the_template_if_no_calls_are_known(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(find_dialect("auto", "auto", "</think>", JSON_CALLS), TemplateDialect)
    assert not isinstance(find_dialect("auto", "auto", '<tool_call> "name"', JSON_CALLS), TemplateDialect)
    assert not isinstance(find_dialect("none", "auto", None, JSON_CALLS), TemplateDialect)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(find_dialect("auto", "auto", None, {"version": 9}), TemplateDialect)
    assert "version" in caplog.text


@pytest.mark.parametrize("spec", [None, 7, {}, {"version": 9}, {"start_anchor": "x", "fields": {"a": {"b": 1}}}])
def test_a_template_that_cannot_be_used_is_no_parser(spec: Any) -> None:
    with pytest.raises(UnknownParser, match="response_template"):
        find_dialect("template", "template", None, spec)
    with pytest.raises(UnknownParser, match="both"):
        find_dialect("template", "think", None, JSON_CALLS)
