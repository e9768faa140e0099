"""Outputs of a schema have its numbers exactly: they are compared as decimals."""

from __future__ import annotations

import json
import random
from decimal import Decimal, localcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from tests.unit.grammar.test_llguidance_compiler import END, TOKENIZER_JSON, VOCAB_SIZE, allows, walk

IDS = [1234567890123456789, 1234567890123456790, 987654321098765432]
SIGNED = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [END])


def of_schema(schema: Any, whitespace: str | None = "") -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), whitespace=whitespace)


def of_tag(schema: Any) -> Grammar:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"format": tag}), whitespace="")


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"enum": IDS}, [str(each) for each in IDS], ["1234567890123456768", "1234567890123456788"]),
    ({"const": 2**53 + 1}, [str(2**53 + 1)], [str(2**53), str(2**53 + 2)]),
    ({"const": 2**64 + 1}, [str(2**64 + 1)], [str(2**64)]),
    ({"enum": [IDS[0], "a", None, True, [2**53 + 1]]}, [str(IDS[0]), '"a"', "null", "true", f"[{2**53 + 1}]"], ["1"]),
    ({"type": "string", "enum": [IDS[0], "a"]}, ['"a"'], [str(IDS[0])]),
    ({"enum": IDS, "minimum": IDS[0] + 1}, [str(IDS[1])], [str(IDS[0]), str(IDS[2])]),
    (SIGNED, ["-9223372036854775808", "0", "9223372036854775807"], ["-9223372036854775809", "9223372036854775808"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**64 - 1)], [str(2**64), "-1"]),
    ({"type": "integer", "minimum": 2**63 + 10}, [str(2**63 + 10), "1" + "0" * 30], [str(2**63 + 9), "5"]),
    ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 1)], [str(2**53)]),
    ({"type": "integer", "exclusiveMaximum": -(2**53)}, [str(-(2**53) - 1)], [str(-(2**53)), "1"]),
    ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, [str(2**53 + 1)], [str(2**53)]),
    ({"const": 1.9999999998835847}, ["1.9999999998835847"], ["1.999999999883585"]),
    ({"type": "number", "minimum": 12345678.12345678}, ["12345678.12345678", "12345678.2"], ["12345678.12345677"]),
    ({"type": "integer", "const": 1e19}, ["1" + "0" * 19], ["9223372036854775807"]),
    ({"type": "integer", "maximum": float(2**64)}, [str(2**64 - 4000)], [str(2**64 + 1), str(2**65)]),
    (
        {"type": "number", "minimum": 0.1, "maximum": 1e30},
        ["0.1", "0.15", "1", "9" * 29],
        ["0.09", "-1", "1" + "0" * 30],
    ),
    ({"type": "number", "exclusiveMinimum": -0.05, "maximum": 2**60 + 1}, ["0", "-0.049"], ["-0.05", "-1"]),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["-1.5", "9" * 60], []),
    ({"type": ["integer", "null"], "maximum": 2**60 + 1}, [str(2**60 + 1), "null"], [str(2**60 + 2), '"a"']),
    ({"anyOf": [{"const": IDS[0]}, {"type": "array", "items": {"type": "null"}}]}, [str(IDS[0]), "[null]"], ["1"]),
    ({"allOf": [{"$ref": "#/$defs/id"}], "$defs": {"id": {"enum": IDS}}}, [str(IDS[1])], ["1234567890123456788"]),
    ({"type": "array", "items": {"enum": IDS}, "minItems": 1, "maxItems": 2}, [f"[{IDS[0]},{IDS[2]}]"], ["[]", "[1]"]),
    (an_object(user={"enum": IDS}, a={}), [f'{{"user":{IDS[1]},"a":{{"b":[7]}}}}'], ['{"user":1234567890123456788}']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[json.dumps(schema)[:60] for schema, _, _ in CASES])
def test_numbers_that_a_double_would_round(
    compiler: GrammarCompiler, schema: Any, good: list[str], bad: list[str]
) -> None:
    for grammar, begin, end in ((of_schema(schema), "", ""), (of_tag(schema), "<", ">")):
        assert [text for text in good if not allows(compiler, grammar, begin + text + end)] == []
        assert [text for text in bad if allows(compiler, grammar, begin + text + end)] == []


def test_an_object_keeps_its_form_beside_an_exact_number(compiler: GrammarCompiler) -> None:
    """Optional and further properties, recursion, and whitespace as the library has them."""
    schema = {
        "type": "object",
        "properties": {"id": {"enum": IDS}, "next": {"$ref": "#"}, "no": False, "n": {"type": "integer"}},
        "required": ["id"],
    }
    grammar = of_schema(schema, None)
    one = f'"id": {IDS[0]}'
    for text in ("{" + one + "}", f'{{\n  {one},\n  "n": 1 }}', f'{{{one}, "more": {{"a": [1]}}, "x": 1}}'):
        assert allows(compiler, grammar, text), text
    assert allows(compiler, grammar, f'{{{one}, "next": {{{one}}}}}')
    for text in ("{}", f'{{"n": 1, {one}}}', f'{{{one}, "no": 1}}', f"{{{one}, {one}}}", f'{{{one},   "n": 1}}'):
        assert not allows(compiler, grammar, text), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "patternProperties": {"a": {"const": 2**60 + 1}}}, "'patternProperties'"),
        ({"type": "integer", "minimum": 2**60 + 1, "multipleOf": 3}, "'multipleOf'"),
        ({"type": "number", "multipleOf": 1.9000000000000001}, "too many digits"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53}, "no output"),
        ({"type": "integer", "minimum": 10**65}, "64 digits"),
        # What request bodies make of 2^64 + 1.
        ({"const": float(2**64)}, "64 bits"),
        ({"enum": [1, {"a": [float(2**64)]}]}, "64 bits"),
        ({"type": "number", "minimum": float(2**64)}, "64 bits"),
        ({"const": 2**60 + 1, "type": "string"}, "no output"),
        ({"type": "object", "properties": {"a": {"const": 2**60 + 1}}, "required": 7}, "malformed"),
    ],
)
def test_a_number_that_cannot_be_kept_is_refused(compiler: GrammarCompiler, schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(of_schema(schema))


WIDE = st.one_of(
    st.integers(-(2**66), 2**66),
    st.sampled_from([sign * 2**power + step for sign in (1, -1) for power in (53, 63, 64) for step in (-1, 0, 1)]),
    st.floats(-1e6, 1e6),
    st.floats(-9e18, 9e18),
    st.integers(-1000, 1000),
)
BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), WIDE, max_size=2
)
NUMBERS = st.one_of(
    BOUNDS.flatmap(lambda bounds: st.sampled_from(["integer", "number"]).map(lambda kind: {"type": kind, **bounds})),
    st.lists(WIDE, min_size=1, max_size=4, unique=True).map(lambda values: {"enum": values}),
    WIDE.map(lambda value: {"const": value}),
)


def follows(value: Decimal, schema: dict[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return value in {as_decimal(each) for each in schema.get("enum", [schema.get("const")])}
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    return (
        (schema["type"] == "number" or value == value.to_integral_value())
        and (low is None or value >= as_decimal(low))
        and (above is None or value > as_decimal(above))
        and (high is None or value <= as_decimal(high))
        and (below is None or value < as_decimal(below))
    )


def as_decimal(number: float) -> Decimal:
    return Decimal(repr(number))


def near(schema: dict[str, Any], rng: random.Random) -> Decimal:
    """A number at, or beside, one of the schema's."""
    values = schema.get("enum", [value for name, value in schema.items() if name != "type"])
    value = as_decimal(rng.choice(values or [0]))
    with localcontext(prec=400):
        return value + rng.choice([Decimal(0), Decimal(0), Decimal(1), Decimal(-1), Decimal("0.5"), Decimal(2**40)])


@given(schema=NUMBERS, seed=st.integers(0, 2**32))
def test_random_numbers_of_a_random_schema(compiler: GrammarCompiler, schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    try:
        compiler.compile(of_schema(schema))
        text = walk(compiler, of_schema(an_object(a=schema)), seed)
    except GrammarError:  # nothing follows it, which the library may notice in an object alone
        return
    if text is not None:
        found = json.loads(text, parse_int=Decimal, parse_float=Decimal)["a"]
        assert follows(found, schema), (schema, text)
    is_exact = any(abs(each) >= 2**53 for each in schema.get("enum", schema.values()) if not isinstance(each, str))
    number = near(schema, rng)
    written = format(number, "f")
    if allows(compiler, of_schema(schema), written):
        assert follows(number, schema), (schema, written)
    elif is_exact and number == number.to_integral_value() and "." not in written and abs(number) < 10**30:
        assert not follows(number, schema), (schema, written)
