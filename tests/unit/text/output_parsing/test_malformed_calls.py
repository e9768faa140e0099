"""Calls that are not well-formed: they are content, and never become other calls."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvrelay.text.output_parsing.events import ArgumentsDelta, Event, Tool, ToolCallBegun
from kvrelay.text.output_parsing.parser_base import MAX_HELD_CHARS
from tests.fakes.call_families import FAMILIES, TOOLS, Call, Family
from tests.fakes.parsed_output import calls_of, check_splits, content_of, parsed
from tests.fakes.random_outputs import mutated, random_calls
from tests.fakes.well_formed_calls import well_formed_calls
from tests.thoroughness import examples

BEHIND = "\n~"
"""A text behind the calls, so that none of them is cut by the end of the output."""
ALONE = ("pythonic", "llama4")
"""Nothing may stand behind their calls."""
UNCONSTRAINED = ("deepseek_v32",)
OPEN = (*ALONE, "qwen3_coder", "seed_oss", "minimax_m2", "deepseek_v32", "glm45")
"""A value of them without an end goes on to the end of the output."""
UNTYPED = [Tool(name="weather"), Tool(name="now")]


def pieces_of(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def is_part(found: Sequence[Call], of: Sequence[Call]) -> bool:
    """The calls stand there in this order."""
    left = iter(of)
    return all(call in left for call in found)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FAMILIES)
def test_mutated_calls_are_well_formed_or_content(name: str) -> None:
    family, num_calls = FAMILIES[name], 0
    tools = UNTYPED if name in ALONE else TOOLS
    for seed in range(examples(300)):
        rng = random.Random(f"{name} {seed}")
        text = mutated(rng, family, family.calls(random_calls(rng))) + ("" if name in ALONE else BEHIND)
        if "\\/" in text:
            continue  # a grammar of pythonic calls writes JSON, where this is one character
        events = parsed(lambda: family.new_parser(tools), [text])
        for pieces in (pieces_of(rng, text), list(text)):
            assert parsed(lambda: family.new_parser(tools), pieces) == events, (seed, text)
        found = calls_of(events)
        if name in OPEN and found and not is_object(found[-1][1]):
            found.pop()  # the output ends in a value of it
        if name in ALONE and found and not well_formed_calls(family.parser, text):
            assert not calls_of(parsed(lambda: family.new_parser(tools), [text + "\0" * 9 + "]"])), (seed, text)
            continue  # only its end is missing
        assert all(is_object(arguments) for _, arguments in found), (seed, text, found)
        read = [(each, json.loads(arguments)) for each, arguments in found]
        assert is_part(read, well_formed_calls(family.parser, text)), (seed, text, read)
        if not calls_of(events) and family.parser != "harmony":
            assert content_of(events) == text, (seed, text)
        num_calls += len(found)
    assert num_calls > examples(300) // 6


def untyped(name: str, text: str) -> list[Event]:
    return check_splits(lambda: FAMILIES[name].new_parser([*UNTYPED, Tool(name="f")]), text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(city='a' 'b')]", {"city": "ab"}),
        ("[f(city='a' \"b\"\n'''c''')]", {"city": "abc"}),
        ("[f(city=('a' 'b'), days=(1), tags=(1,), more=())]", {"city": "ab", "days": 1, "tags": [1], "more": []}),
        ("[f(city='\\101\\x42\\U00000043', days=0x1F)]", {"city": "ABC", "days": 31}),
        ("[f(days=-1e999, tags=[1_000, -2.5])]", {"days": -sys.float_info.max, "tags": [1000, -2.5]}),
        ("[f(tags={'a' 'b': {1: true}},),]", {"tags": {"ab": {"1": True}}}),
    ],
)
def test_pythonic_calls_mean_what_python_means(text: str, arguments: Any) -> None:
    events = untyped("pythonic", text)
    assert [(name, json.loads(written)) for name, written in calls_of(events)] == [("f", arguments)]
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("pythonic", f"[f({arguments})]")
            for arguments in (
                *(
                    "days=1 + 2",
                    "days=1+2",
                    "city='a' + 'b'",
                    "city=f'{x}'",
                    "city=b'a'",
                    "city='a' % 1",
                    "days=2 ** 9",
                ),
                *("'Zürich'", "*a", "**a", "days=1, days=2", "city='a\nb'", "city='\\x4'", "city='\\N{DASH}'", "a-b=1"),
                *("days=nan", "days=1j", "days=1#", "tags={1, 2}", "tags=[*a]", "city=other", "in=1"),
                *("tags=[1 2]", "days=1 2", "city='a'.upper()", "city='a'[0]", "days=-x", "city='a' if x else 'b'"),
            )
        ),
        *(("pythonic", text) for text in ("[f()] + [f()]", "[f()][0]", "[f(), 1]", "[f(), g()]", "[f(days=1) f()]")),
        *(
            ("hermes", f"<tool_call>{text}</tool_call>")
            for text in (
                *(
                    '{"name": "f", "arguments": {}} text',
                    '{"name": "f", "arguments": {}}}',
                    '{"name": "f", "arguments": []}',
                ),
                *(
                    '{"name": "f", "arguments": 7}',
                    '{"name": "f", "arguments": "x"}',
                    '{"name": "f", "arguments": "[]"}',
                ),
                *('{"name": "f", "name": "now"}', '{"name": "f", "arguments": {}, "parameters": {}}', '{"name": "f",}'),
                *(f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("NaN", "01", "1.", "'a'", "tru")),
                *(f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("[1,]", "[1 2]", '"\\x"', '"a\nb"')),
                *('{"name": "f", "arguments": {"a": 1,}}', '{"name": "f", "arguments": {"a" 1}}', '{"arguments": {}}'),
                '{"name": "f", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}",
            )
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>\na\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>\na\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\ntext\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f g>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>\ntext</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>city</arg_key>\ntext\n</tool_call>"),
        ("glm45", "<tool_call>f g\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</minimax:tool_call>',
        ),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\ntext\n</invoke>\n</minimax:tool_call>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, 1]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1,}'),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
        ("mistral_json", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": 1}]'),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{} x<|tool_call_end|>"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1} x<|call|>'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>oops"),
    ],
)
def test_what_is_not_well_formed_is_content_as_written(name: str, text: str) -> None:
    for written in (text, text + "\nmore"):
        events = untyped(name, written)
        assert calls_of(events) == []
        assert content_of(events).replace("\n", "") == written.replace("\n", "").removesuffix("<|call|>").replace(
            "<|call|>", ""
        )


INNER: list[Call] = [("now", {})]


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "glm45", "mistral", "kimi_k2", "deepseek_v31", "llama3_json"]
)
def test_a_call_that_a_malformed_one_quotes_is_none(name: str) -> None:
    family = FAMILIES[name]
    outer = family.calls([("weather", {"city": "QUOTED"})]).replace('"QUOTED"', "'QUOTED'")
    if name in ("qwen3_coder", "glm45"):
        outer = outer.replace("weather", "wea ther<arg_key>" if name == "glm45" else "wea ther")
    events = untyped(name, outer.replace("QUOTED", family.calls(INNER)))
    assert calls_of(events) == []


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v31"])
def test_a_malformed_call_does_not_hide_those_behind_its_end(name: str) -> None:
    family = FAMILIES[name]
    good = family.calls(INNER)
    bad = family.calls([("weather", {"city": "x", "tags": []})]).replace("[]", "[,]").replace("</function>", "")
    bad = bad.replace("</arg_key>", "</arg_key>x")
    for before, behind in (("", good), (good, ""), (good, good)):
        events = untyped(name, before + bad + behind)
        assert [each for each, _ in calls_of(events)] == ["now"] * (bool(before) + bool(behind))


def test_a_tag_in_a_text_hides_no_call() -> None:
    for name in ("hermes", "qwen3_coder", "glm45"):
        call = FAMILIES[name].calls(INNER)
        events = untyped(name, f"I write <tool_call> first. {call}")
        assert [each for each, _ in calls_of(events)] == ["now"]


# -- calls that are passed on before their end -----------------------------------------------------------------------

LONG = "x" * (2 * MAX_HELD_CHARS)


def fed(family: Family, tools: Sequence[Tool], text: str) -> list[Event]:
    """The events of an output that goes on."""
    parser = family.new_parser(tools)
    return [event for char in text for event in parser.feed(char)]


@pytest.mark.parametrize("name", FAMILIES)
def test_long_calls_and_those_of_a_grammar_are_passed_on_as_they_come(name: str) -> None:
    family = FAMILIES[name]
    strict = [msgspec.structs.replace(tool, is_strict=True) for tool in TOOLS]
    for tools, city in ((TOOLS, LONG), *([(strict, "Zürich, the city")] if name not in UNCONSTRAINED else [])):
        text = family.calls([("weather", {"city": city})])
        begun = fed(family, tools, text[: text.index(city) + len(city) - 4])
        assert isinstance(begun[0], ToolCallBegun)
        written = "".join(event.text for event in begun if isinstance(event, ArgumentsDelta))
        assert len(written) > len(city) - 10 and not is_object(written)
        events = check_splits_of_some(family, tools, text)
        assert [(each, json.loads(arguments)) for each, arguments in calls_of(events)] == [("weather", {"city": city})]
    short = family.calls([("weather", {"city": "Zürich, the city"})])
    assert fed(family, TOOLS, short[: short.index("city") + 8]) == []


def check_splits_of_some(family: Family, tools: Sequence[Tool], text: str) -> list[Event]:
    whole = parsed(lambda: family.new_parser(tools), [text])
    rng = random.Random(text)
    for pieces in (list(text), *(pieces_of(rng, text) for _ in range(20))):
        assert parsed(lambda: family.new_parser(tools), pieces) == whole
    return whole


@pytest.mark.parametrize("behind", [" text}\n</tool_call>", "}} text</tool_call>", ", }}</tool_call>"])
def test_a_long_call_that_turns_out_malformed_stays_incomplete(behind: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {{"city": "{LONG}"{behind}'
    events = check_splits_of_some(FAMILIES["hermes"], TOOLS, text)
    ((name, arguments),) = calls_of(events)
    assert name == "weather" and arguments.startswith(f'{{"city": "{LONG}') and not is_object(arguments)
    assert content_of(events).endswith("</tool_call>")
