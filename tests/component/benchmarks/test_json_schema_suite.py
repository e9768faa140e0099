"""The report over the JSON Schema Test Suite counts what is accepted, refused, valid and wrong."""

from __future__ import annotations

import pytest

from benchmarks.json_schema_suite import RandomModel, check, kind_of, verdict

pytestmark = pytest.mark.component

SUITE = [
    {
        "file": "own.json",
        "groups": [
            {"description": "enum", "schema": {"enum": ["an otter", 7, None]}},
            {"description": "not", "schema": {"not": {"type": "integer"}}},
            {"description": "multiples", "schema": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}},
        ],
    }
]


def test_schemas_are_accepted_or_refused_with_a_reason_and_answers_are_valid() -> None:
    lines = check(SUITE, 4)
    assert lines[0].startswith("3 schemas: 2 accepted (67%), 1 refused")
    assert lines[0].endswith("8 valid.")
    assert sum(line.startswith("| Unimplemented keys") for line in lines) == 1


def test_verdicts() -> None:
    schema = {"type": "integer", "multipleOf": 3}
    assert [verdict(schema, answer) for answer in ("6", "7", "6 7", None)] == ["valid", "wrong", "wrong", "cut"]
    assert verdict({"multipleOf": 0.0001}, "0.0075") == "valid"
    assert kind_of('Unknown key "a", 3 times\nmore') == "Unknown key .., .. times"


def test_answers_depend_on_the_seed_alone() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 8}
    first, again = [[model.answer(schema, seed) for seed in range(5)] for model in (RandomModel(), RandomModel())]
    assert first == again and len(set(first)) > 1
