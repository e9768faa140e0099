"""Every value of a narrowed schema is valid for the schema before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvrelay.grammar.schema_narrowing import narrowed
from tests.thoroughness import examples
from tests.unit.grammar.test_schema_rewrite import SCHEMAS, VALUES, keywords

pytestmark = pytest.mark.unit
LISTED = st.lists(st.sampled_from(["a", "b", "c", None, True]), min_size=1, max_size=3)
ARRAYS = st.fixed_dictionaries(
    {},
    optional={
        "contains": SCHEMAS | st.just({"const": "a"}),
        "minContains": st.integers(0, 3),
        "maxContains": st.integers(0, 3),
        "items": SCHEMAS | st.fixed_dictionaries({"enum": LISTED}) | st.just({"type": "boolean"}),
        "uniqueItems": st.booleans(),
        "minItems": st.integers(0, 3),
    },
)
ITEMS = st.lists(st.sampled_from(["a", "b", "c", None, True, False, 1]), max_size=5)


@settings(max_examples=examples(400))
@given(
    schema=keywords(SCHEMAS) | ARRAYS | st.fixed_dictionaries({"properties": st.fixed_dictionaries({"a": ARRAYS})}),
    values=st.lists(VALUES | ITEMS | st.fixed_dictionaries({"a": ITEMS}), min_size=5, max_size=20),
)
def test_a_narrowed_schema_takes_no_other_values(schema: dict[str, Any], values: list[Any]) -> None:
    text = narrowed(json.dumps(schema))
    assume(text is not None)
    assert text is not None
    before, after = Draft202012Validator(schema), Draft202012Validator(json.loads(text))
    for value in values:
        assert before.is_valid(value) or not after.is_valid(value), (text, value)


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"contains": {"const": "a"}}, [["a"], ["b", "a", "b"], ["a", "a"], {}]),
        ({"contains": {"const": "a"}, "minContains": 2}, [["b", "a", "a"]]),
        ({"contains": {"const": "a"}, "maxContains": 1}, [["b", "a", "b"], ["a"]]),
        ({"contains": {"const": "a"}, "minContains": 0, "maxContains": 1}, [[], ["b"], ["b", "a"]]),
        ({"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["a", "c"], ["a", "b", "c"], "a"]),
        ({"format": "json-pointer"}, ["", "/a~0b/0", 7]),
        ({"format": "relative-json-pointer"}, ["0", "1#", "2/a~1", 7]),
    ],
    ids=json.dumps,
)
def test_usual_values_are_left(schema: dict[str, Any], valid: list[Any]) -> None:
    after = Draft202012Validator(json.loads(narrowed(json.dumps(schema)) or ""))
    assert [after.is_valid(value) for value in valid] == [True] * len(valid)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"properties": {"a": {"contains": {"const": 1}}}}},
        {"oneOf": [{"contains": {"const": 1}}, {"maxItems": 2}]},
        {"$defs": {"a": {"contains": {"const": 1}}}, "oneOf": [{"$ref": "#/$defs/a"}, {"maxItems": 2}]},
        {"if": {"contains": {"const": 1}}, "then": {"maxItems": 2}},
        {"contains": {"pattern": "^a"}, "maxContains": 1},
        {"uniqueItems": True, "items": {"type": "string"}},
        {"uniqueItems": True, "items": {"enum": [1, 1.0]}},
        {"const": {"contains": {}}},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_narrowed_stays(schema: dict[str, Any]) -> None:
    assert narrowed(json.dumps(schema)) is None
