"""Which texts the grammars of calls allow, and that the parser finds the same calls in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.output_parsing.call_grammar import WHITESPACE, MarkedCallGrammar, Marker, Thinking
from kvrelay.text.output_parsing.dialect import CallGrammar, find_dialect
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.formats import TOOL_FORMATS
from tests.fakes.call_families import FAMILIES, UNWRITTEN
from tests.fakes.call_families import TOOLS as FAMILY_TOOLS
from tests.fakes.text_model import byte_level_tokenizer

DIALECTS = [
    find_dialect(name, "think", None) for name in sorted({each.parser for each in FAMILIES.values()} - {"harmony"})
]
HARMONY = find_dialect("harmony", "harmony", None)
MARKERS = sorted({marker for dialect in (*DIALECTS, HARMONY) for marker in dialect.markers})
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "$defs": {"city": {"type": "string"}},
}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOLS = [
    Tool(name="weather", parameters=CITY, is_strict=True),
    Tool(name="now"),
    Tool(name="loose", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]}),
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, NOW, LOOSE = call("weather", '{"city": "Zürich"}'), call("now", "{}"), call("loose", '{"a":1}')
BAD = [
    *(call("weather", "{}"), call("other", "{}"), call("weather", '{"city": 7}'), call("now", '{"a": 1}')),
    *(
        call("loose", "{}"),
        call("loose", '{"a":  1}'),
        GOOD[:-1],
        GOOD + "\n",
        GOOD + GOOD,
        "It rains.",
        "",
        " " + GOOD,
    ),
]
THOUGHT = "<think>A <tool_call> 🦦 </thin</think>"


class Model:
    """A tokenizer in which the markers are special tokens, other added tokens, or text."""

    def __init__(self, kind: str) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.has_tokens = kind != "text"
        if self.has_tokens:
            added = [tokenizers.AddedToken(each, special=kind == "special", normalized=False) for each in MARKERS]
            self.tokenizer.add_tokens(added)
        end = self.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        self.end = end
        self.compiler = LLGuidanceCompiler(self.tokenizer.to_str(), self.tokenizer.get_vocab_size(), [self.end])

    def marker_of(self, text: str) -> Marker:
        if not self.has_tokens or text not in MARKERS:
            return text
        return {"type": "token", "token": self.tokenizer.token_to_id(text), "text": text}

    def grammar(self, thinking: Thinking | None = None) -> CallGrammar:
        syntax = next(each.syntax for each in TOOL_FORMATS if each.name == "hermes" and each.syntax is not None)
        return MarkedCallGrammar(syntax=syntax, thinking=thinking, marker_of=self.marker_of)

    def allows(self, tag_format: Any, text: str, *, spelled: bool = False) -> bool:
        """`spelled`: markers come as text even if they are tokens."""
        tag = json.dumps({"type": "structural_tag", "format": tag_format})
        matcher = self.compiler.compile(Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=tag, whitespace=WHITESPACE))
        try:
            pieces = list(text) if spelled else [text]
            ids = [each for piece in pieces for each in self.tokenizer.encode(piece, add_special_tokens=False).ids]
            matcher.accept([*ids, self.end])
        except GrammarError:
            return False
        return True


@pytest.fixture(scope="module", params=["special", "added", "text"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def test_required_calls_are_all_of_the_output(model: Model) -> None:
    grammar = model.grammar().required(TOOLS, is_parallel=True)
    for text in (GOOD, NOW, LOOSE, f"{GOOD}\n{NOW}\n{GOOD}"):
        assert model.allows(grammar, text), text
    for text in (*BAD, THOUGHT + GOOD):
        assert not model.allows(grammar, text), text


def test_one_call_if_they_must_not_be_parallel(model: Model) -> None:
    grammar = model.grammar().required(TOOLS[:1], is_parallel=False)
    assert model.allows(grammar, GOOD)
    assert not model.allows(grammar, f"{GOOD}\n{GOOD}") and not model.allows(grammar, NOW)


@pytest.mark.parametrize("is_open", [True, False])
def test_required_calls_come_behind_the_reasoning(model: Model, is_open: bool) -> None:
    grammar = model.grammar(Thinking("<think>", "</think>", is_open)).required(TOOLS, is_parallel=True)
    thought = THOUGHT.replace("<tool_call>", "tool").removeprefix("<think>" if is_open else "")
    for gap in ("", "\n", "\n\n"):
        assert model.allows(grammar, f"{thought}{gap}{GOOD}\n{NOW}")
        assert not model.allows(grammar, f"{thought}{gap}It rains.")
    assert model.allows(grammar, GOOD) is not is_open
    assert not model.allows(grammar, thought)


def test_free_text_with_calls_of_strict_tools(model: Model) -> None:
    grammar = model.grammar().allowed(TOOLS)
    loose = call("loose", '{"b": []}')
    for text in ("", "It <tool rains.", GOOD, f"So: {GOOD} and\n{loose}{GOOD} done"):
        assert model.allows(grammar, text), text
    for text in (call("weather", "{}"), f"{GOOD} <tool_call>", "<tool_call>x</tool_call>", call("other", "{}")):
        assert not model.allows(grammar, text), text
        assert not model.allows(grammar, text, spelled=True), text


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_before_free_text_may_name_the_marker_of_calls(model: Model, is_open: bool) -> None:
    """As text: a token is none of the text that reasoning consists of."""
    grammar = model.grammar(Thinking("<think>", "</think>", is_open)).allowed(TOOLS)
    thought = THOUGHT.replace("<tool_call>", "tool" if model.has_tokens else "<tool_call>")
    thought = thought.removeprefix("<think>" if is_open else "")
    for text in ("", "\n\nIt rains.", f"\n\nSo {GOOD}\n{NOW}."):
        assert model.allows(grammar, thought + text), text
    assert model.allows(grammar, f"So {GOOD}") is not is_open
    assert not model.allows(grammar, thought + call("weather", "{}"))


def test_a_schema_that_the_library_refuses_is_rewritten_in_a_call(model: Model) -> None:
    schema = {"properties": {"a": {"not": {"type": "string"}}}, "required": ["a"], "additionalProperties": False}
    grammar = model.grammar().required([Tool(name="f", parameters=schema)], is_parallel=True)
    assert model.allows(grammar, call("f", '{"a": 7}')) and not model.allows(grammar, call("f", '{"a": "7"}'))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_models_write_is_allowed(model: Model, name: str) -> None:
    """As far as the grammar writes as the model does: the order of arguments and spaces are the tokenizer's choice."""
    family = FAMILIES[name]
    if name in UNWRITTEN:
        pytest.skip("the parser reads it too, but the grammar writes the other form")
    dialect = find_dialect(family.parser, "harmony" if name == "harmony" else "none", None)
    calls = dialect.call_grammar(model.marker_of, begins_inside=False)
    assert calls is not None
    tools = [Tool(name=tool.name, parameters=tool.parameters, is_strict=True) for tool in FAMILY_TOOLS]
    good = (
        family.calls([("weather", {"city": "Zürich", "days": 3})])
        .replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
        .replace("'", '"')
    )
    bad = good.replace("3", "three")
    for text, is_allowed in ((good, True), (bad, False)):
        assert model.allows(calls.required(tools, is_parallel=True), text) is is_allowed, text
        assert model.allows(calls.allowed(tools), text) is is_allowed, text
    free = "<|channel|>final<|message|>It rains." if name == "harmony" else "It rains."
    assert model.allows(calls.allowed(tools), free) and not model.allows(calls.required(tools, is_parallel=True), free)
