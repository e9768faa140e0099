"""Outputs that are calls or a text of a format: the grammar allows nothing else, and the parser tells them apart."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.output_parsing.call_grammar import Format, Unconstrainable
from kvrelay.text.output_parsing.dialect import Dialect, find_dialect
from kvrelay.text.output_parsing.events import ContentText, Event, OutputParser, Tool
from tests.fakes.call_families import FAMILIES, UNWRITTEN
from tests.fakes.parsed_output import calls_of, check_splits, content_of, parsed
from tests.fakes.random_constraints import random_schema
from tests.unit.text.output_parsing.test_call_grammar import Model
from tests.unit.text.output_parsing.test_random_calls import PARSERS, random_tool, sampled

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    Tool(name="weather", parameters={**WEATHER, "additionalProperties": False}, is_strict=True),
    Tool(name="now", parameters={"type": "object", "properties": {"zone": {"type": "string"}}}),
]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
CALL_SHAPED: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["name", "parameters"],
}
SCHEMAS = (PERSON, ANY_OBJECT, CALL_SHAPED, {"anyOf": [PERSON, CALL_SHAPED]}, {"type": "array"})


@pytest.fixture(scope="module", params=["special", "text"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return [Model(kind) for kind in ("special", "added", "text")]


def dialect_of(parser_name: str, reasoning: str = "none") -> Dialect:
    return find_dialect(parser_name, "harmony" if parser_name == "harmony" else reasoning, None)


def content(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def grammar_of(model: Model, dialect: Dialect, schema: Any, tools: Sequence[Tool] = TOOLS, **more: bool) -> Format:
    calls = dialect.call_grammar(model.marker_of, begins_inside=False, **more)
    assert calls is not None
    return calls.or_text(content(schema), tools, is_parallel=True)


def answer(parser_name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if parser_name == "harmony" else text


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNWRITTEN])
def test_each_family_writes_calls_or_the_format(model: Model, name: str) -> None:
    family = FAMILIES[name]
    dialect = dialect_of(family.parser)
    grammar = grammar_of(model, dialect, PERSON)
    call = family.calls([("weather", {"city": "Zürich"})]).replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    call = call.replace("'", '"')
    text = answer(family.parser, '{"name": "weather", "age": 7}')
    assert model.allows(grammar, call) and model.allows(grammar, text)
    for wrong in ("It rains.", '{"name": 7}', "", text + call, f"So: {call}", call.replace("city", "town")):
        assert not model.allows(grammar, wrong), wrong
    parser = dialect.beside_format
    events = check_splits(lambda: parser.new_parser(TOOLS, begins_inside=False), call)
    ((called, arguments),) = calls_of(events)
    assert (called, json.loads(arguments), content_of(events)) == ("weather", {"city": "Zürich"}, "")
    events = check_splits(lambda: parser.new_parser(TOOLS, begins_inside=False), text)
    assert calls_of(events) == [] and content_of(events) == '{"name": "weather", "age": 7}'


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("harmony", "deepseek_v32")])
def test_a_text_that_quotes_a_call_is_a_text(name: str) -> None:
    family = FAMILIES[name]
    parser = dialect_of(family.parser).beside_format
    text = json.dumps({"quoted": family.calls([("weather", {"city": "Zürich"})])})
    for written in (text, f"\n\n{text}", json.dumps(family.calls([("now", {})])), "\n" * 20 + text):
        events = check_splits(lambda: parser.new_parser(TOOLS, begins_inside=False), written)
        assert calls_of(events) == [] and content_of(events) == written


BARE = '{"name": "weather", "parameters": {"city": "Zürich"}}'


def test_bare_json_with_the_keys_of_a_call_is_a_call(model: Model) -> None:
    """It cannot be a text of the format, whatever the format allows."""
    dialect = dialect_of("llama3_json")
    optional = {**CALL_SHAPED, "required": ["name"]}
    for schema in (ANY_OBJECT, optional, {"$ref": "#/$defs/a", "$defs": {"a": optional}}, True):
        grammar = grammar_of(model, dialect, schema)
        for text in (BARE, f"{BARE}; {BARE}", '{"name": "weather"}', '{"name": "other"}'):
            assert model.allows(grammar, text), (schema, text)
        for text in (BARE.replace('"Zürich"', "7"), BARE[:-1] + ', "a": 1}', '{"name": "a", "parameters": {}}'):
            assert not model.allows(grammar, text), (schema, text)
    grammar = grammar_of(model, dialect, ANY_OBJECT)
    for text in ('{"a": 1, "name": "now"}', '{"parameters": {}}', '{"name": 7, "b": {"name": 1, "parameters": 1}}'):
        assert model.allows(grammar, text), text
    parser = dialect.beside_format
    for text in ('{"name": "weather"}', '{"name": "weather", "param', '{"na me": "now", "parameters": {}}'):
        events = check_splits(lambda: parser.new_parser(TOOLS, begins_inside=False), text)
        assert calls_of(events) == [] and content_of(events) == text
    events = check_splits(lambda: parser.new_parser(TOOLS, begins_inside=False), BARE.replace(" ", "\n"))
    assert [name for name, _ in calls_of(events)] == ["weather"] and content_of(events) == ""


def test_a_format_that_needs_the_keys_of_a_bare_call_is_refused(model: Model) -> None:
    def compiled(parser_name: str) -> None:
        tag = json.dumps({"format": grammar_of(model, dialect_of(parser_name), CALL_SHAPED)})
        model.compiler.compile(Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=tag))

    with pytest.raises(GrammarError, match="'parameters' is unsatisfiable"):
        compiled("llama3_json")
    compiled("hermes")


def test_references_in_the_arguments_of_bare_calls(model: Model) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a"]}
    tools = [Tool(name="f", parameters={**parameters, "$defs": {"node": node}}, is_strict=True)]
    grammar = grammar_of(model, dialect_of("llama3_json"), PERSON, tools)
    for arguments, is_allowed in (('{"a": {"next": {"next": {}}}}', True), ('{"a": {"next": 7}}', False)):
        assert model.allows(grammar, f'{{"name": "f", "parameters": {arguments}}}') is is_allowed


@pytest.mark.parametrize("parser_name", ["hermes", "llama3_json", "pythonic"])
def test_both_follow_the_reasoning(model: Model, parser_name: str) -> None:
    """Behind a gap, unless the format is no JSON, which cannot have it."""
    family, dialect = FAMILIES[parser_name], dialect_of(parser_name, "think")
    call = family.calls([("now", {})]).replace("'", '"')
    thought = "<think>Hm 🦦</think>"
    grammar = grammar_of(model, dialect, PERSON)
    for text in (call, '{"name": "a", "age": 7}'):
        for gap in ("", "\n", "\n\n"):
            assert model.allows(grammar, f"{thought}{gap}{text}") and model.allows(grammar, text)
    calls = dialect.call_grammar(model.marker_of, begins_inside=False, follows_reasoning=True)
    assert calls is not None
    regex = calls.or_text({"type": "regex", "pattern": "[a-c]+"}, TOOLS, is_parallel=True)
    assert model.allows(regex, call) and model.allows(regex, "abc") and not model.allows(regex, "\nabc")


MARKED = [name for name in FAMILIES if name not in (*UNWRITTEN, "harmony", "llama3_json", "pythonic")]


@pytest.mark.parametrize("name", MARKED)
def test_a_text_by_a_regex_cannot_begin_as_a_call(model: Model, name: str) -> None:
    """Strict tools' calls would not follow their schemas, and texts would be read as calls."""
    dialect, family = dialect_of(FAMILIES[name].parser), FAMILIES[name]
    calls = dialect.call_grammar(model.marker_of, begins_inside=False)
    assert calls is not None
    grammar = calls.or_text({"type": "regex", "pattern": "(.|\n)*"}, TOOLS, is_parallel=True)
    call = family.calls([("weather", {"city": "Zürich"})]).replace("[TOOL_CALLS] [", "[TOOL_CALLS][").replace("'", '"')
    assert model.allows(grammar, call)
    for text in ("It rains.", "", "[1, 2]", "{}", "<tool", f"So {call}"):
        assert model.allows(grammar, text, spelled=True), text
    for text in (
        call.replace("city", "town"),
        f"\n {call}.",
        call.replace("Zürich", "7 ,\n").replace("city", "to\nwn"),
    ):
        assert not model.allows(grammar, text, spelled=True), text


def random_format(rng: random.Random) -> Any:
    return rng.choice(SCHEMAS) if rng.random() < 0.3 else random_schema(rng, 2)


def check_calls(tools: Sequence[Tool], calls: Sequence[tuple[str, str]]) -> None:
    by_name = {tool.name: tool for tool in tools}
    for name, arguments in calls:
        if by_name[name].is_strict:
            jsonschema.validate(json.loads(arguments), by_name[name].parameters)
        else:
            assert isinstance(json.loads(arguments), dict)


def check_output(models: list[Model], parser_name: str, seed: int) -> str:
    """Returns what the output is: "calls", "text", or "" if it was cut."""
    rng = random.Random(seed)
    model, is_parallel, is_open = rng.choice(models), rng.random() < 0.5, rng.random() < 0.3
    tools = [
        Tool(name=each.name, parameters=each.parameters, is_strict=rng.random() < 0.5)
        for each in (random_tool(rng, f"tool_{number}") for number in range(rng.randint(1, 3)))
    ]
    dialect, schema = dialect_of(parser_name, rng.choice(["none", "think"])), random_format(rng)
    grammar = dialect.call_grammar(model.marker_of, begins_inside=is_open)
    assert grammar is not None
    try:
        text, is_complete = sampled(model, grammar.or_text(content(schema), tools, is_parallel=is_parallel), rng)
    except (Unconstrainable, GrammarError):
        return ""

    def new_parser() -> OutputParser:
        return dialect.beside_format.new_parser(tools, begins_inside=is_open)

    events: list[Event] = parsed(new_parser, [text])
    cuts = sorted(rng.randint(0, len(text)) for _ in range(6))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(new_parser, pieces) == parsed(new_parser, list(text)) == events, (seed, text)
    calls, said = calls_of(events), content_of(events)
    check_calls(tools, calls if is_complete else calls[:-1])
    if not is_complete:
        return ""
    if not calls:
        jsonschema.validate(json.loads(said), schema)
        return "text"
    assert is_parallel or len(calls) == 1, (seed, text)
    assert not any(isinstance(event, ContentText) for event in events), (seed, text)
    return "calls"


@pytest.mark.parametrize("parser_name", PARSERS)
@pytest.mark.parametrize(("first", "last"), [(0, 16), pytest.param(16, 140, marks=pytest.mark.slow)])
def test_random_outputs_are_valid_calls_or_valid_texts(
    models: list[Model], parser_name: str, first: int, last: int
) -> None:
    kinds = [check_output(models, parser_name, seed) for seed in range(first, last)]
    assert kinds.count("calls") > 0 and kinds.count("text") > 0, kinds
