"""Schemas of the values that another JSON schema refuses, for keywords that can be turned around."""

from __future__ import annotations

import re
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_TEXT_CHARS = 64
MAX_DEPTH = 16

_OPPOSITE_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum"),
    "maximum": ("number", "exclusiveMinimum"),
    "exclusiveMinimum": ("number", "maximum"),
    "exclusiveMaximum": ("number", "minimum"),
}
_OPPOSITE_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_ANNOTATIONS = {"$schema", "$comment", "title", "description", "default", "examples", "deprecated"}


def negation(schema: Any, depth: int = 0) -> Any:
    """A schema for which exactly the values are valid that are not valid for `schema`. None: there is none."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    parts = []
    for name, value in schema.items():
        if name in _ANNOTATIONS:
            continue
        part = _of_keyword(name, value, depth + 1)
        if part is None:
            return None
        parts.append(part)
    return _any_of(parts)


def _of_keyword(name: str, value: Any, depth: int) -> Any:
    match name, value:
        case "not", _:
            return value
        case ("allOf", list()):
            return _all_known("anyOf", [negation(each, depth) for each in value])
        case ("anyOf", list()):
            return _all_known("allOf", [negation(each, depth) for each in value])
        case "type", _:
            return _of_types([value] if isinstance(value, str) else value)
        case "const", _:
            return _not_equal(value)
        case ("enum", list()) if len(value) <= 16:
            return _all_known("allOf", [_not_equal(each) for each in value])
        case ("required", list()) if all(isinstance(each, str) for each in value):
            return _any_of([{"type": "object", "properties": {each: False}} for each in value])
        case ("properties", dict()):
            opposites = [(each, negation(schema, depth)) for each, schema in value.items()]
            if any(opposite is None for _, opposite in opposites):
                return None
            parts = [
                {"type": "object", "properties": {each: opposite}, "required": [each]} for each, opposite in opposites
            ]
            return _any_of(parts)
        case name, int() | float() if name in _OPPOSITE_BOUNDS and not isinstance(value, bool):
            kind, opposite = _OPPOSITE_BOUNDS[name]
            return {"type": kind, opposite: value}
        case name, int() if name in _OPPOSITE_COUNTS and not isinstance(value, bool):
            kind, opposite, more = _OPPOSITE_COUNTS[name]
            return {"type": kind, opposite: value + more} if value + more >= 0 else False
        case _:
            return None


def _of_types(types: Any) -> Any:
    """JSON schema has no keyword for numbers that are no integers."""
    if not isinstance(types, list) or ("integer" in types and "number" not in types):
        return None
    others = [each for each in TYPES if each not in types]
    return {"type": others} if others else False


def _not_equal(value: Any) -> Any:
    if value is None:
        return _of_types(["null"])
    if isinstance(value, bool):
        return {"anyOf": [_of_types(["boolean"]), {"const": not value}]}
    if isinstance(value, int | float):
        bounds = ({"type": "number", name: value} for name in ("exclusiveMinimum", "exclusiveMaximum"))
        return {"anyOf": [_of_types(["number"]), *bounds]}
    if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS:
        return {"anyOf": [_of_types(["string"]), {"type": "string", "pattern": _other_texts(value)}]}
    return None


def _other_texts(text: str) -> str:
    """A regex for all texts but one: ones that end earlier, have another character somewhere, or go on."""
    pattern = r"[\s\S]+"
    for char in reversed(text):
        escaped = re.escape(char) if char not in "^]\\" else "\\" + char
        pattern = rf"(|[^{escaped}][\s\S]*|{re.escape(char)}{pattern})"
    return f"^{pattern}$"


def _all_known(name: str, parts: list[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    return _any_of(parts) if name == "anyOf" else {"allOf": parts} if parts else True


def _any_of(parts: list[Any]) -> Any:
    if True in [part for part in parts if isinstance(part, bool)]:
        return True
    possible = [part for part in parts if part is not False]
    return {"anyOf": possible} if len(possible) > 1 else possible[0] if possible else False
