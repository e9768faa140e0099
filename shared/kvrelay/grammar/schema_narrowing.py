"""Replaces keywords of JSON schemas by stricter ones if the library of grammars supports no equivalent.

Every value of a narrowed schema is valid for the schema before, but not the other way round. So nothing is narrowed if
the opposite of a schema counts, as in `not`, `if` and `oneOf`.

- `contains`: the items that it asks for stand beside each other, and begin within the first `MAX_PLACES` items.
- `uniqueItems`, of items with at most `MAX_UNIQUE` listed values: the values have the order of the list.
- Formats: see `FORMATS` and `PATTERNS`.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from kvrelay.grammar.schema_negation import TYPES, negation
from kvrelay.grammar.schema_walk import MAX_DEPTH, NotRewritten, Schema, replace_subschemas, require_all

MAX_PLACES = 4
MAX_CONTAINED = 16
MAX_UNIQUE = 6
FORMATS = {"idn-email": "email", "iri": "uri", "iri-reference": "uri", "uri-reference": "uri"}
"""Each format with one all of whose texts have it too."""
PATTERNS = {
    "json-pointer": r"^(/([^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$",
}

_SCHEMAS = ("additionalProperties", "items", "propertyNames", "contains")
_LISTS = ("allOf", "anyOf", "prefixItems")
_OPPOSITE_COUNTS = ("not", "if", "oneOf", "unevaluatedProperties", "unevaluatedItems")
_LISTED = {"enum", "const", "type", "title", "description"}


def narrowed(text: str) -> str | None:
    """The schema, given as JSON, narrowed. None if no rule changes it, or if it is too deep."""
    try:
        schema = json.loads(text)
        result = _narrow(schema, 0)
    except (NotRewritten, ValueError, RecursionError):
        return None
    return json.dumps(result) if result != schema else None


def _narrow(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if depth > MAX_DEPTH or not schema.keys().isdisjoint(_OPPOSITE_COUNTS):
        raise NotRewritten
    result = dict(schema)
    extra = [*_contained(result), *_unique(result), *_formatted(result)]

    def replace(each: Any) -> Any:
        return _narrow(each, depth + 1)

    replace_subschemas(result, replace, single=_SCHEMAS, lists=_LISTS)
    require_all(result, [replace(each) for each in extra])
    return result


def _contained(schema: Schema) -> list[Any]:
    if "contains" not in schema:
        return []
    wanted, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    if not _is_count(least) or least > MAX_CONTAINED or not (most is None or _is_count(most)):
        return []
    other: Any = True
    if most is not None:
        other = negation(wanted)
        if other is None:
            return []
    for name in ("contains", "minContains", "maxContains"):
        schema.pop(name, None)
    counts = [least] if most is None else range(least, min(most, MAX_CONTAINED) + 1)
    arrays: list[Any] = []
    for count in counts:
        for place in range(MAX_PLACES if count else 1):
            first = [other] * place + [wanted] * count
            array: Schema = {"type": "array", "minItems": len(first), "items": other}
            arrays.append(array | ({"prefixItems": first} if first else {}))
    return [_if_array(arrays)]


def _unique(schema: Schema) -> list[Any]:
    items = schema.get("items")
    if schema.get("uniqueItems") is not True or "prefixItems" in schema or not isinstance(items, dict):
        return []
    values = _listed(items)
    if values is None or len(values) > MAX_UNIQUE:
        return []
    del schema["uniqueItems"]
    chosen = [part for count in range(len(values) + 1) for part in combinations(values, count)]
    arrays = [
        {"type": "array", "minItems": len(part), "maxItems": len(part)}
        | ({"prefixItems": [{"const": value} for value in part]} if part else {})
        for part in chosen
    ]
    return [_if_array(arrays)]


def _listed(items: Schema) -> list[Any] | None:
    """The values of items, of which no two are equal, if they are listed."""
    if items.keys() <= {"type", "title", "description"} and items.get("type") == "boolean":
        return [False, True]
    if not items.keys() <= _LISTED or not items.keys() & {"enum", "const"}:
        return None
    values = [items["const"]] if "const" in items else items["enum"]
    if not isinstance(values, list) or not all(isinstance(each, str | bool | None) for each in values):
        return None  # numbers may be equal though they are written in other ways
    return list(dict.fromkeys(values))


def _formatted(schema: Schema) -> list[Any]:
    name = schema.get("format")
    if not isinstance(name, str):
        return []
    if name in FORMATS:
        schema["format"] = FORMATS[name]
    elif name in PATTERNS:
        del schema["format"]
        return [{"pattern": PATTERNS[name]}]
    return []


def _if_array(arrays: list[Any]) -> Any:
    return {"anyOf": [{"type": [each for each in TYPES if each != "array"]}, *arrays]}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
