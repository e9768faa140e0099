"""Values of arguments that a model writes as text: which types their schemas allow, and their JSON."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import orjson

MAX_NESTING = 128
"""Of lists and objects in arguments. Clients and chat templates must be able to read what lies deeper."""
MAX_DEPTH = 8
"""Of references and alternatives in a schema that are followed. What lies deeper may have any type."""

IS_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?").fullmatch
"""Matches a number of JSON."""

Types = frozenset[str]
ANY_TYPE: Types = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
STRING: Types = frozenset({"string"})


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Types:
    """The JSON types that a schema allows. `root`: the schema that its references are resolved in."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY_TYPE
    types = ANY_TYPE
    declared = schema.get("type")
    if isinstance(declared, str):
        types &= _with_integers(declared)
    elif isinstance(declared, list):
        types &= frozenset().union(*(_with_integers(each) for each in declared if isinstance(each, str)))
    if "const" in schema:
        types &= _types_of_value(schema["const"])
    if isinstance(schema.get("enum"), list):
        types &= frozenset().union(*map(_types_of_value, schema["enum"]))
    if isinstance(schema.get("$ref"), str):
        types &= types_of(resolve(schema["$ref"], root), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            types &= frozenset().union(*(types_of(each, root, depth + 1) for each in schema[name]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= types_of(each, root, depth + 1)
    return types or ANY_TYPE


def _with_integers(name: str) -> Types:
    return frozenset({name, "integer"} if name == "number" else {name})


def _types_of_value(value: Any) -> Types:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return STRING
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case list() | tuple():
            return frozenset({"array"})
    return frozenset({"object"})


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a local reference names. None if there is none."""
    found: Any = root
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found


def written_json(text: str, types: Types) -> str:
    """Returns the JSON text of a value that a model wrote as text. Text that is no value of these types becomes a
    string if the schema allows strings or if it is no JSON; else it is returned unchanged. So nothing is lost."""
    if types == STRING:
        return quoted(text)
    written = text.strip()
    try:
        value = orjson.loads(written)
    except orjson.JSONDecodeError:
        value = _odd_value(written)
        if value is _NO_VALUE:
            return quoted(text)
        written = _without_surrogates(json.dumps(value, ensure_ascii=False))
    if not _is_json(value) or ("string" in types and not _types_of_value(value) & types):
        return quoted(text)
    return written


def is_json_object(text: str) -> bool:
    """Whether this is JSON text of an object that every client can read."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and _is_json(value)


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(_without_surrogates(text), ensure_ascii=False)


def _without_surrogates(text: str) -> str:
    """Lone surrogates cannot be written in UTF-8."""
    return text.encode(errors="replace").decode()


def in_range(number: str) -> str:
    """The text of a JSON number. One beyond all floats, which not every client can read, becomes the last of them."""
    if math.isfinite(float(number)):
        return number
    return repr(-sys.float_info.max if number.startswith("-") else sys.float_info.max)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    parse_constant=_no_constant,
    parse_float=lambda text: float(in_range(text)),
)
_NO_VALUE = object()
MAX_LITERAL_CHARS = 1 << 16
MAX_INTEGER_BITS = 1024


def _odd_value(text: str) -> Any:
    """JSON with halves of characters or numbers out of range, or a literal of Python, as models also write them."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _python_value(text)


def _python_value(text: str) -> Any:
    if len(text) > MAX_LITERAL_CHARS:
        return _NO_VALUE
    lowered = {"true": True, "false": False, "none": None}.get(text.lower(), _NO_VALUE)
    if lowered is not _NO_VALUE:
        return lowered
    try:
        value = ast.literal_eval(text)
        if "#" in text:
            ast.literal_eval(f"[{text}]")  # fails if text behind the value is a comment for Python
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return _NO_VALUE
    return value if _is_json(value) else _NO_VALUE


def _is_json(value: Any, depth: int = 0) -> bool:
    match value:
        case None | bool() | str():
            return True
        case int():
            return value.bit_length() <= MAX_INTEGER_BITS
        case float():
            return math.isfinite(value)
        case list() | tuple():
            return depth < MAX_NESTING and all(_is_json(each, depth + 1) for each in value)
        case dict():
            is_object = depth < MAX_NESTING and all(isinstance(key, str) for key in value)
            return is_object and all(_is_json(each, depth + 1) for each in value.values())
    return False
