"""What every family's parser must do, whatever its syntax."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.text.output_parsing.argument_values import ANY_TYPE, types_of, written_json
from kvrelay.text.output_parsing.events import ToolCallBegun
from tests.fakes.call_families import FAMILIES, SYNTAX, Call, Family
from tests.fakes.parsed_output import all_text_of, calls_of, check_splits, content_of, parsed
from tests.thoroughness import examples

HARD: dict[str, Any] = {
    "city": "Zürich \"HB\" 's' \\ {x} </tool_call> 🦦\n\n",
    "days": 3,
    "tags": ["a\"b'", {"deep": [1.5, True, None]}, "é🦦"],
    "note": None,
}
CALLS: Sequence[Call] = [("weather", HARD), ("now", {}), ("weather", {"city": "", "days": -2})]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def read(calls: Sequence[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_parallel_calls_in_any_pieces(family: Family) -> None:
    events = check_splits(family.new_parser, family.calls(CALLS))
    assert read(calls_of(events)) == CALLS and content_of(events) == ""


def test_content_in_front_of_calls(family: Family) -> None:
    if family.parser in ("pythonic", "llama3_json", "harmony"):
        pytest.skip("its calls stand at the beginning, or content has a marker of its own")
    events = check_splits(family.new_parser, "I will look 🦦.\n\n" + family.calls(CALLS[:1]))
    assert read(calls_of(events)) == CALLS[:1] and content_of(events) == "I will look 🦦."


def test_a_cut_call_is_cut_alone(family: Family) -> None:
    text = family.calls(CALLS)
    for end in range(len(text)):
        events = parsed(family.new_parser, [text[:end]])
        assert events == parsed(family.new_parser, list(text[:end]))
        calls = calls_of(events)
        assert read(calls[:-1]) == CALLS[: max(0, len(calls) - 1)]
        assert text[:end].rstrip().endswith(content_of(events).rstrip())
        if calls:
            assert calls[-1][0] == CALLS[len(calls) - 1][0]


def test_text_without_calls_is_content(family: Family) -> None:
    for text in ("", " An otter 🦦 [1, 2] {x}\n", "a < b [", "[weather in Zürich]", "[1, 2, 3]", '{"answer": 42}'):
        events = check_splits(family.new_parser, text)
        assert calls_of(events) == [] and content_of(events) == text


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_any_text_survives_in_any_pieces(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    piece = st.sampled_from([*family.pieces, *SYNTAX, family.calls(CALLS[1:2])])
    text = "".join(data.draw(st.lists(piece, max_size=24)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole = parsed(family.new_parser, [text])
    assert parsed(family.new_parser, [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]) == whole
    assert parsed(family.new_parser, list(text)) == whole
    kept = all_text_of(whole)
    if not calls_of(whole) and name != "harmony":
        assert kept == text
    is_cut = any(not is_object(arguments) for _, arguments in calls_of(whole))  # with the name of an argument, say
    # Headers, and fields beside the name, are no text.
    if name != "harmony" and '"name"' not in text and not is_cut:
        assert kept.count("🦦") == text.count("🦦")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(st.characters(codec="utf-8"), max_size=20),
        "days": st.integers(-1000, 10**12),
        "tags": st.lists(VALUES, max_size=3),
    },
)


XML_ENDS = {
    "qwen3_coder": re.compile(
        r"</parameter>\s*(<parameter=|</function>|</tool_call>)|</function>\n</tool_call>\s*<tool_call>"
    ),
    "seed_oss": re.compile(
        r"</parameter>\s*(<parameter=|</function>|</seed:tool_call>)|</function>\n</seed:tool_call>\s*<seed:tool_call>"
    ),
    "minimax_m2": re.compile(r"</parameter>\s*(<parameter name=\"|</invoke>)"),
    "deepseek_v32": re.compile(r"</｜DSML｜parameter>\s*(<｜DSML｜parameter name=\"|</｜DSML｜invoke>)"),  # noqa: RUF001
    "glm45": re.compile(r"</arg_value>\s*(<arg_key>|</tool_call>)"),
}


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_markers_within_values_belong_to_the_values(name: str, data: st.DataObject) -> None:
    """All that a value of an XML-like call cannot have is a closing tag with a valid continuation."""
    family = FAMILIES[name]
    piece = st.sampled_from([each for each in family.pieces if not each.startswith("<|")] + ["\n", " ", "x", "é🦦"])
    values = data.draw(st.lists(st.lists(piece, max_size=8).map("".join), min_size=1, max_size=2))
    calls: list[Call] = [("weather", {"city": value, "days": 1}) for value in values]
    text = family.calls(calls)
    if name in XML_ENDS:
        assume(all(not XML_ENDS[name].search(f"{value}\n</parameter>") for value in values))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    events = parsed(family.new_parser, [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])])
    assert parsed(family.new_parser, list(text)) == events
    assert read(calls_of(events)) == calls and content_of(events) == ""


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.just("weather"), ARGUMENTS), min_size=1, max_size=3), st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_random_arguments_come_back(name: str, calls: list[Call], data: st.DataObject) -> None:
    family = FAMILIES[name]
    text = family.calls(calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]
    events = parsed(family.new_parser, pieces)
    assert read(calls_of(events)) == calls and content_of(events) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "kimi_k2",
            "<|tool_calls_section_begin|>"
            + "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>" * 3
            + "<|tool_calls_section_end|>",
        ),
        ("mistral", "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}" * 3),
    ],
)
def test_ids_that_a_model_writes_again_are_replaced(name: str, text: str) -> None:
    parser = FAMILIES[name].new_parser()
    ids = [event.call_id for event in (*parser.feed(text), *parser.finish()) if isinstance(event, ToolCallBegun)]
    assert len(set(ids)) == 3 and ids[0] in text
    if name == "kimi_k2":
        assert ids == ["functions.weather:0", "functions.weather:1", "functions.weather:2"]


# -- types that schemas allow, and values that models write as text --------------------------------------------------


ROOT: dict[str, Any] = {"$defs": {"unit": {"enum": ["c", "f"]}, "self": {"$ref": "#/$defs/self"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"const": 3}, {"integer", "number"}),
        ({"$ref": "#/$defs/unit"}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "array"}]}, {"string", "array"}),
        ({"allOf": [{"type": ["string", "object"]}, {"type": "object"}]}, {"object"}),
        ({"$ref": "#/$defs/self"}, ANY_TYPE),
        ({"$ref": "https://example.com"}, ANY_TYPE),
        ({"$ref": "#/$defs/missing"}, ANY_TYPE),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ('"null"', {"type": ["string", "null"]}, "null"),
        ("{'a': [1, True, 'é']}", {"type": "object"}, {"a": [1, True, "é"]}),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        (" [1, 2]\n", {}, [1, 2]),
        ("hello", {}, "hello"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("'\\ud800'", {}, "?"),
    ],
)
def test_values(text: str, schema: dict[str, Any], value: Any) -> None:
    written = written_json(text, types_of(schema, schema))
    assert json.loads(written) == value
    written.encode()
