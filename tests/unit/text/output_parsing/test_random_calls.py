"""Outputs that are sampled at random from the masks of a grammar of calls: the parser finds valid calls in all."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.output_parsing.call_grammar import WHITESPACE, Unconstrainable
from kvrelay.text.output_parsing.dialect import find_dialect
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, Tool, ToolCallBegun
from tests.fakes.call_families import FAMILIES, UNWRITTEN
from tests.fakes.random_constraints import random_schema
from tests.unit.text.output_parsing.test_call_grammar import Model

MAX_TOKENS = 600
CHUNK = 90
PARSERS = sorted({family.parser for name, family in FAMILIES.items() if name not in UNWRITTEN})
ENDERS = ('"', "<", "<|im_end|>", "</think>", "<|end|>", "</arg_value>")


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return [Model(kind) for kind in ("special", "added", "text")]


def random_tool(rng: random.Random, name: str) -> Tool:
    schema = random_schema(rng, 2)
    return Tool(name=name, parameters={"properties": {"a": schema}, "required": ["a"], "additionalProperties": False})


def sampled(model: Model, tag_format: dict[str, Any], rng: random.Random) -> tuple[str, bool]:
    """The text of tokens that are about equally likely, and whether the output is complete."""
    tag = json.dumps({"type": "structural_tag", "format": tag_format})
    grammar = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=tag, whitespace=WHITESPACE)
    matcher = model.compiler.compile(grammar)
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        mask = np.zeros(model.compiler.mask_words, np.int32)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        # Strings and runs of calls would end too seldom.
        enders = [each for each in allowed if model.tokenizer.id_to_token(int(each)) in ENDERS]
        if enders and rng.random() < 0.3:
            token_id = int(rng.choice(enders))
        matcher.accept([token_id])
        if token_id == model.end:
            return model.tokenizer.decode(token_ids, skip_special_tokens=False), True
        token_ids.append(token_id)
    return model.tokenizer.decode(token_ids, skip_special_tokens=False), False


def check_output(models: list[Model], parser_name: str, seed: int) -> bool:
    """Returns whether the output is complete. Its calls are valid in any case, but for the last one of a cut output."""
    rng = random.Random(seed)
    model, is_parallel, is_open = rng.choice(models), rng.random() < 0.5, rng.random() < 0.5
    tools = [random_tool(rng, f"tool_{number}") for number in range(rng.randint(1, 3))]
    reasoning = "harmony" if parser_name == "harmony" else rng.choice(["none", "think"])
    dialect = find_dialect(parser_name, reasoning, None)
    calls = dialect.call_grammar(model.marker_of, begins_inside=is_open)
    assert calls is not None
    try:
        text, is_complete = sampled(model, calls.required(tools, is_parallel=is_parallel), rng)
    except (Unconstrainable, GrammarError):
        return False
    parser = dialect.new_parser(tools, begins_inside=is_open)
    events: list[Event] = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallBegun)]
    arguments = ["" for _ in names]
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
    schemas = {tool.name: tool.parameters for tool in tools}
    num_whole = len(names) if is_complete else len(names) - 1
    for name, written in list(zip(names, arguments, strict=True))[: max(0, num_whole)]:
        jsonschema.validate(json.loads(written), schemas[name])
    if is_complete:
        assert names and (is_parallel or len(names) == 1), (seed, text)
        assert not any(isinstance(event, ContentText) for event in events), (seed, text)
    return is_complete


@pytest.mark.parametrize("parser_name", PARSERS)
@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 10), *(pytest.param(n, n + CHUNK, marks=pytest.mark.slow) for n in range(10, 100, CHUNK))],
)
def test_calls_of_random_tools_are_valid_or_cut(models: list[Model], parser_name: str, first: int, last: int) -> None:
    num_complete = sum(check_output(models, parser_name, seed) for seed in range(first, last))
    assert num_complete > (last - first) // 3
