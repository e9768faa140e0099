"""Rewritten schemas take the same values as the schemas before."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from kvrelay.grammar.schema_negation import negation
from kvrelay.grammar.schema_rewrite import rewritten
from tests.thoroughness import examples

pytestmark = pytest.mark.unit

NAMES = st.sampled_from(["a", "b", "^", "a]"])
TEXTS = st.sampled_from(["", "a", "b", "ab", "a]", "^-\\", "a b", "ä\n"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def keywords(schema: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named, listed = st.dictionaries(NAMES, schema, max_size=2), st.lists(schema, min_size=1, max_size=3)
    count = st.integers(0, 3) | st.just(2.0)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
            "const": SCALARS,
            "enum": st.lists(SCALARS, min_size=1, max_size=3),
            "minimum": st.integers(-3, 3),
            "exclusiveMaximum": st.integers(-3, 3),
            "minLength": count,
            "maxItems": count,
            "required": st.lists(NAMES, max_size=2, unique=True),
            "properties": named,
            "additionalProperties": schema,
            "propertyNames": schema | st.just({"enum": ["a", "b"]}) | st.just({"pattern": "^a"}),
            "items": schema,
            "contains": schema,
            "minContains": count,
            "maxContains": count,
            "uniqueItems": st.booleans(),
            "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
            "dependentSchemas": named,
            "unevaluatedProperties": schema,
            "unevaluatedItems": schema,
            "if": schema,
            "then": schema,
            "else": schema,
            "not": schema,
            "allOf": listed,
            "anyOf": listed,
            "oneOf": listed,
        },
    )


SCHEMAS = st.recursive(
    st.booleans() | st.fixed_dictionaries({"type": TYPES}) | st.fixed_dictionaries({"const": SCALARS}),
    keywords,
    max_leaves=6,
)


@settings(max_examples=examples(400))
@given(schema=keywords(SCHEMAS), values=st.lists(VALUES, min_size=1, max_size=10), splits=st.booleans())
def test_a_rewritten_schema_takes_the_same_values(schema: dict[str, Any], values: list[Any], splits: bool) -> None:
    text = rewritten(json.dumps(schema), splits_one_of=splits)
    assume(text is not None)
    assert text is not None
    before, after = Draft202012Validator(schema), Draft202012Validator(json.loads(text))
    for value in values:
        assert before.is_valid(value) == after.is_valid(value), (text, value)


@settings(max_examples=examples(400))
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=1, max_size=10))
def test_a_negation_takes_the_values_that_the_schema_refuses(schema: Any, values: list[Any]) -> None:
    opposite = negation(schema)
    assume(opposite is not None)
    for value in values:
        assert Draft202012Validator(schema).is_valid(value) != Draft202012Validator(opposite).is_valid(value), opposite


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "integer"}},  # nothing says "a number that is no integer"
        {"not": {"pattern": "^a"}},
        {"not": {"items": {"type": "null"}}},
        {"contains": {"type": "null"}},
        {"uniqueItems": True},
        {"anyOf": [{"contains": {"type": "null"}}], "unevaluatedItems": False},
        {"if": {"pattern": "^a"}, "unevaluatedProperties": False},
        {"$ref": "other.json", "unevaluatedProperties": False},
        {"if": {"pattern": "^a"}, "then": {"maxLength": 3}},
        {"$dynamicRef": "#node", "$defs": {name: {"$dynamicAnchor": "node", "$id": name} for name in "ab"}},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_what_has_no_equivalent_stays(schema: dict[str, Any]) -> None:
    assert rewritten(json.dumps(schema)) is None


def test_a_dynamic_reference_with_one_anchor_is_an_ordinary_one() -> None:
    schema = {"$dynamicAnchor": "node", "properties": {"child": {"$dynamicRef": "#node"}}}
    assert json.loads(rewritten(json.dumps(schema)) or "") == {
        "$anchor": "node",
        "properties": {"child": {"$ref": "#node"}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "properties": {"b": True}, "unevaluatedProperties": False},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "unevaluatedProperties": {"type": "null"}},
        {"oneOf": [{"$ref": "#/$defs/b"}, {"properties": {"a": {"type": "null"}}}], "unevaluatedProperties": False},
        {"dependentSchemas": {"a": {"$ref": "#/$defs/b"}}, "properties": {"a": True}, "unevaluatedProperties": False},
        {"$ref": "#/$defs/c", "unevaluatedItems": False},
    ],
    ids=json.dumps,
)
def test_what_references_evaluate_counts(schema: dict[str, Any]) -> None:
    schema = schema | {
        "$defs": {
            "a": {"properties": {"a": {"type": "integer"}}},
            "b": {"patternProperties": {"^b": True}, "required": ["b"]},
            "c": {"anyOf": [{"prefixItems": [True, {"type": "null"}]}, {"prefixItems": [{"type": "integer"}]}]},
        }
    }
    text = rewritten(json.dumps(schema))
    assert text is not None
    before, after = Draft202012Validator(schema), Draft202012Validator(json.loads(text))
    objects = [
        dict(zip(names, values, strict=False))
        for names in ("", "a", "b", "c", "ab", "abc", "bc")
        for values in ([1, 2, 3], [None, None, None], [1, None, None])
    ]
    arrays = [list(each) for count in range(4) for each in product([1, None], repeat=count)]
    verdicts = [before.is_valid(value) for value in (*objects, *arrays)]
    assert verdicts == [after.is_valid(value) for value in (*objects, *arrays)]
    assert True in verdicts and False in verdicts


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"properties": {"$anchor": {"type": "null"}, "$dynamicAnchor": {"not": {"type": "null"}}}}
    text = rewritten(json.dumps(schema))
    assert text is not None
    after = Draft202012Validator(json.loads(text))
    assert after.is_valid({"$anchor": None, "$dynamicAnchor": 1})
    assert not after.is_valid({"$dynamicAnchor": None})


def test_old_drafts_have_no_number_of_contained_items() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "contains": True, "minContains": 0}
    text = rewritten(json.dumps(schema))
    assert text is not None
    for value in ([], [1], "a"):
        assert Draft7Validator(schema).is_valid(value) == Draft7Validator(json.loads(text)).is_valid(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"not":' * 5000 + "{}" + "}" * 5000,
        '{"not":' * 200 + "{}" + "}" * 200,
        json.dumps({"anyOf": [{"minLength": 2.0}] * 5000}),
        json.dumps({"properties": {str(number): {"if": {"const": "x" * 60}} for number in range(5000)}}),
        "[",
        "7",
        '{"allOf": 5, "not": {"required": ["a"]}}',
    ],
    ids=["deep", "deep enough to be parsed", "long", "wide", "no JSON", "no schema", "malformed"],
)
def test_large_and_deep_schemas_are_left_alone(text: str) -> None:
    assert rewritten(text, splits_one_of=True) is None
