"""Rewritten schemas take the same values as the schemas before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvrelay.grammar.schema_rewrite import closed, negation, rewritten
from tests.thoroughness import examples

NAMES = st.sampled_from(["a", "b", "^", "a]"])
TEXTS = st.sampled_from(["", "a", "b", "ab", "a]", "^-\\", "a b", "ä\n"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def keywords(schema: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named, listed = st.dictionaries(NAMES, schema, max_size=2), st.lists(schema, min_size=1, max_size=3)
    count = st.integers(0, 3)
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

NAMED = {
    "one": {"type": "object", "properties": {"a": {"const": "a"}}, "required": ["a"]},
    "two": {"allOf": [{"type": "object"}, {"properties": {"a": {"enum": ["b", "ab"]}}, "required": ["a", "b"]}]},
    "text": {"type": ["string", "null"]},
}
UNIONS = st.fixed_dictionaries(
    {
        "oneOf": st.lists(
            st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMED])
            | st.sampled_from([{"type": "integer"}, {"allOf": [{"$ref": "#/$defs/one"}], "title": "One"}])
            | SCHEMAS,
            min_size=1,
            max_size=3,
        ),
        "$defs": st.just(NAMED),
    }
)
TAGGED = st.fixed_dictionaries({"a": TEXTS}, optional={"b": SCALARS})


@settings(max_examples=examples(400))
@given(schema=keywords(SCHEMAS) | UNIONS, values=st.lists(VALUES | TAGGED, min_size=1, max_size=10))
def test_a_rewritten_schema_takes_the_same_values(schema: dict[str, Any], values: list[Any]) -> None:
    text = rewritten(json.dumps(schema))
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
    ("schema", "valid", "invalid"),
    [
        ({"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}], "$defs": NAMED}, [{"a": "a"}], [{"a": "c"}, 1]),
        ({"properties": {"kind": {"const": "a"}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{}], []),
        (
            {"if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, "then": {"required": ["b"]}},
            [{"kind": "b"}, {"kind": "a", "b": 1}],
            [{"kind": "a"}],
        ),
        ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"dependencies": {"a": ["b"], "c": {"minProperties": 3}}}, [{}, {"a": 1, "b": 1}], [{"a": 1}, {"c": 1}]),
        ({"propertyNames": {"type": "string"}}, [{"a": 1}], []),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            [{"a": None}],
            [{"c": None}],
        ),
        ({"properties": {"a": True}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"not": {"required": ["a"]}}, [{}], [{"a": 1}]),
        ({"type": "string", "format": "password"}, ["", "a"], [1]),
        ({"type": "string", "format": "byte"}, ["", "YQ==", "YWI=", "YWJj"], ["a", "YQ=", "Y!=="]),
        ({"format": "json-pointer"}, ["", "/a~0b/0", 7], ["a", "/~"]),
    ],
    ids=json.dumps,
)
def test_what_usual_producers_write(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    after = Draft202012Validator(json.loads(rewritten(json.dumps(schema)) or ""))
    assert (
        not {"oneOf", "if", "dependentRequired", "propertyNames", "not", "unevaluatedProperties"} & after.schema.keys()
    )
    assert [after.is_valid(value) for value in valid] == [True] * len(valid)
    assert [after.is_valid(value) for value in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "integer"}},  # nothing says "a number that is no integer"
        {"not": {"pattern": "^a"}},
        {"contains": {"type": "null"}},
        {"uniqueItems": True},
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        {"if": {"pattern": "^a"}, "then": {"maxLength": 3}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [{"$ref": "#/$defs/one"}, {"required": ["a"]}], "$defs": NAMED},
        {"oneOf": [{"$ref": "other.json"}, {"$ref": "#/$defs/text"}], "$defs": NAMED},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_what_has_no_equivalent_stays(schema: dict[str, Any]) -> None:
    assert rewritten(json.dumps(schema)) is None


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"properties": {"if": {"type": "null"}, "not": {"not": {"type": "null"}}}}
    after = Draft202012Validator(json.loads(rewritten(json.dumps(schema)) or ""))
    assert after.is_valid({"if": None, "not": 1})
    assert not after.is_valid({"not": None})


@pytest.mark.parametrize(
    "text",
    [
        '{"not":' * 5000 + "{}" + "}" * 5000,
        '{"not":' * 200 + "{}" + "}" * 200,
        json.dumps({"anyOf": [{"not": {"required": ["a"]}}] * 5000}),
        json.dumps({"properties": {str(number): {"if": {"const": "x" * 60}} for number in range(5000)}}),
        "[",
        "7",
        '{"allOf": 5, "not": {"required": ["a"]}}',
    ],
    ids=["deep", "deep enough to be parsed", "long", "wide", "no JSON", "no schema", "malformed"],
)
def test_large_and_deep_schemas_are_left_alone(text: str) -> None:
    assert rewritten(text) is None


ONE: dict[str, Any] = {"properties": {"a": {}}}
OTHER: dict[str, Any] = {"properties": {"b": {}}}
NO_OTHERS = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ONE, ONE | NO_OTHERS),
        ({"type": "object"}, {"type": "object"}),
        (ONE | {"additionalProperties": {"type": "null"}}, ONE | {"additionalProperties": {"type": "null"}}),
        ({"properties": {"a": ONE}}, {"properties": {"a": ONE | NO_OTHERS}} | NO_OTHERS),
        ({"items": ONE}, {"items": ONE | NO_OTHERS}),
        ({"anyOf": [ONE, OTHER]}, {"anyOf": [ONE | NO_OTHERS, OTHER | NO_OTHERS]}),
        ({"allOf": [ONE]}, {"allOf": [ONE | NO_OTHERS]}),
        (
            {"$ref": "#/$defs/one", "$defs": {"one": ONE}},
            {"$ref": "#/$defs/one", "$defs": {"one": ONE | NO_OTHERS}},
        ),
        ({"enum": [ONE], "default": ONE}, {"enum": [ONE], "default": ONE}),
    ],
    ids=json.dumps,
)
def test_objects_that_do_not_say_whether_they_are_open_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [ONE, OTHER]},
        ONE | {"anyOf": [OTHER, True]},
        ONE | {"$ref": "#/$defs/other", "$defs": {"other": OTHER}},
        {"allOf": [{"$ref": "#/$defs/a"}, ONE], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": OTHER}},
        {"not": ONE},
        {"if": ONE, "then": OTHER},
    ],
    ids=json.dumps,
)
def test_objects_that_several_schemas_describe_stay_open(schema: Any) -> None:
    assert closed(schema) == schema
