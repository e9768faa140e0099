"""Types that schemas allow, and values that models write as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.text.output_parsing.argument_values import ANY_TYPE, types_of, written_json

pytestmark = pytest.mark.unit
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
