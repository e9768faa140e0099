"""Grammars of calls whose arguments are written one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.text.output_parsing.argument_values import MAX_DEPTH, STRING, resolve, types_of
from kvrelay.text.output_parsing.call_grammar import ANY_TEXT, NOTHING, Format, Unconstrainable, either, text
from kvrelay.text.output_parsing.events import Tool

UNSUPPORTED = frozenset(
    {
        *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "propertyNames", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "const", "enum"),
    }
)
"""Keywords about all arguments together, which are written one by one here."""

UNSUPPORTED_IN_TEXT = frozenset({"$ref", "anyOf", "oneOf", "allOf", "not", "if"})

DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = ("type", "title", "description", "default", "examples")


class Parameter(msgspec.Struct, frozen=True):
    """`schema`: complete in itself."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def parameters_of(tool: Tool) -> Sequence[Parameter]:
    """Raises Unconstrainable if the arguments of a strict tool cannot be written one by one."""
    schema = tool.parameters
    if tool.is_strict and (found := sorted(UNSUPPORTED & schema.keys())):
        raise Unconstrainable(f"{found[0]!r} at the top of its parameters is not supported for this model")
    required = set(schema.get("required", ()))
    properties: dict[str, Any] = schema.get("properties", {})
    if missing := sorted(required - properties.keys()):
        properties = {**properties, **dict.fromkeys(missing, True)}
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    return [
        Parameter(name, {**shared, **({} if isinstance(each, bool) else each)}, name in required)
        for name, each in properties.items()
        if each is not False
    ]


def bare_value(tool: Tool, parameter: Parameter, closing: str, excluded: str) -> Format | None:
    """A text that is written as it is. None if the value is JSON. Free text ends at the first `closing`, and text of a
    limited length has none of the `excluded` characters."""
    if types_of(parameter.schema, parameter.schema) != STRING:
        return None
    schema = _without_references(parameter.schema)
    if found := sorted(UNSUPPORTED_IN_TEXT & schema.keys()):
        raise Unconstrainable(f"{found[0]!r} of the text {parameter.name!r} is not supported for this model")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        texts = [each for each in choices if isinstance(each, str) and closing not in each]
        if not texts:
            raise Unconstrainable(f"no value of {parameter.name!r} can be written")
        return either([text(each) for each in texts])
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    limits = f"{{{least},{'' if most is None else most}}}" if least or most is not None else ""
    char = f"[^{re.escape(excluded)}]"
    if "pattern" in schema:
        if limits:
            raise Unconstrainable(f"the text {parameter.name!r} has a pattern and a length: only one is supported")
        return {"type": "regex", "pattern": _anywhere(schema["pattern"], char, parameter.name)}
    return {"type": "regex", "pattern": char + limits} if limits else ANY_TEXT


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    resolved = schema
    for _ in range(MAX_DEPTH):
        if "$ref" not in resolved:
            break
        target = resolve(resolved["$ref"], schema)
        if not isinstance(target, dict) or resolved.keys() - {"$ref", *DEFINITIONS, *ANNOTATIONS}:
            break
        resolved = target
    return resolved


def _anywhere(pattern: str, char: str, name: str) -> str:
    """The texts in which the pattern is found, as a regex for a whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if "|" in pattern and (begins or ends):
        raise Unconstrainable(f"the pattern of the text {name!r} has alternatives with '^' or '$'")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else char + '*'}({inner}){'' if ends else char + '*'}"


def optional(parameter: Parameter, written: Format) -> Format:
    return written if parameter.is_required else either([written, NOTHING])
