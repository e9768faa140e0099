"""Grammars of outputs with calls that follow their tools' schemas, as structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from kvrelay.excerpts import quoted
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.output_parsing.argument_values import MAX_DEPTH, STRING, resolve, types_of
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

Format = dict[str, Any]
Marker = str | Format
"""A text, or the format of a token, which is no text for grammars."""
MarkerOf = Callable[[str], Marker]
"""Returns the format of a token for the text of an added token, and other texts as they are."""

ANY_TEXT: Format = {"type": "any_text"}
NOTHING: Format = {"type": "const_string", "value": ""}
WHITESPACE = " ?"
"""Between the tokens of JSON in arguments: a weak model would fill calls with spaces."""
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Unconstrainable(ValueError):
    """No grammar can make the model follow this schema."""


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def marked(marker: Marker) -> Format:
    """A marker as a format of its own."""
    return text(marker) if isinstance(marker, str) else marker


def sequence(*formats: Format) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": list(formats)}


def either(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def tag(begin: Marker, content: Format, end: Marker) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: dict[str, Any]) -> Format:
    """A value in the arguments of a call."""
    return {"type": "json_schema", "json_schema": schema, "whitespace": WHITESPACE}


def json_arguments(tool: Tool, *, is_strict: bool) -> Format:
    """The arguments of a call as a JSON object."""
    schema: dict[str, Any] = {"type": "object"}
    if is_strict:
        schema = {"type": "object", **tool.parameters} if tool.parameters else NO_ARGUMENTS
    return json_value(schema)


def format_of(grammar: Grammar) -> Format:
    """The grammar must have been compiled, so it is well-formed. Whitespace is set for the whole tag."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.CHOICE:
            choices = " | ".join(map(json.dumps, json.loads(grammar.text)))
            return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case GrammarKind.GRAMMAR:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            tag_format: Format = json.loads(grammar.text)["format"]
            return tag_format


GAP = either([text("\n" * count) for count in range(3)])
"""Behind the reasoning."""


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls: each is `begin`, what `content` returns for the tool, and `end`, and several have
    `separator` between them. `content` also gets whether the call must follow the tool's schema.

    `around`: pairs of markers around all calls, the outer ones first. `starts_output`: calls are only at the
    beginning of an output; then its first characters, which are `begin` or the first of `around`, are no free text.
    `bare_keys`: calls are JSON without a marker, objects with the name and the arguments at these keys. `is_single`: an
    output has one call.
    """

    begin: str
    content: Callable[[Tool, bool, MarkerOf], Format]
    end: str
    separator: str
    around: tuple[tuple[str, str], ...] = ()
    starts_output: str = ""
    bare_keys: tuple[str, str] | None = None
    is_single: bool = False

    def openings(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """With what outputs of calls begin. Calls without a marker are told by the tool's name."""
        if not self.starts_output:
            return (self.around[0][0] if self.around else self.begin,)
        if self.bare_keys is not None:
            name, arguments = map(json.dumps, self.bare_keys)
            return tuple(f"{{{name}: {json.dumps(tool.name)}, {arguments}: " for tool in tools)
        begin = "".join([begin for begin, _ in self.around]) + self.begin
        return tuple(begin + _first_text(self.content(tool, tool.is_strict, str)) for tool in tools)


def _first_text(content: Format) -> str:
    """The constant text that a format begins with."""
    match content:
        case {"type": "const_string", "value": str() as value}:
            return value
        case {"type": "sequence", "elements": [*elements]}:
            return "".join(map(_first_text, takewhile(lambda each: each["type"] == "const_string", elements)))
    return ""


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning comes before the calls. `is_open`: the prompt has written `begin`."""

    begin: str
    end: str
    is_open: bool


class MarkedCallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Writes the formats of outputs whose calls stand behind the reasoning: `thinking`, or what came before the grammar
    if it `follows_reasoning`. Its methods raise Unconstrainable."""

    syntax: CallSyntax
    thinking: Thinking | None
    marker_of: MarkerOf
    follows_reasoning: bool = False

    def required(self, tools: Sequence[Tool], *, is_parallel: bool) -> Format:
        """The output is a call of these tools, or several if they may be parallel, behind the reasoning if there is
        any. All follow their schemas."""
        return self._behind_reasoning(self._calls(tools, all_strict=True, is_parallel=is_parallel), GAP)

    def or_text(self, content: Format, tools: Sequence[Tool], *, is_parallel: bool) -> Format:
        """The output is calls, of which those of strict tools follow their schemas, or a text with this content. What
        begins with the marker of calls is no such text, nor, if they are JSON without one, JSON with their keys."""
        is_json, keys = content["type"] == "json_schema", self.syntax.bare_keys
        calls = self._calls(tools, all_strict=False, is_parallel=is_parallel)
        if content["type"] == "regex" and not self.syntax.starts_output:  # the library's lexer would take it first
            content = {**content, "excludes": _begins_with(self.syntax.openings(tools))}
        if is_json and keys is not None:
            calls["tags"] = [tag("", either([_bare_call(tool, keys) for tool in tools]), "")]
            content = {**content, "json_schema": _without_both(content["json_schema"], keys)}
        # Without reasoning the gap is a part of the text, in which JSON may have it.
        has_gap = is_json or self.thinking is not None
        return self._behind_reasoning(either([calls, content]), GAP if has_gap else NOTHING)

    def allowed(self, tools: Sequence[Tool]) -> Format:
        """The output is free text in which calls may stand. Those of strict tools follow their schemas."""
        output = self._text_with_calls(tools)
        if self.thinking is None:
            return output
        return sequence(self._optional(self._reasoning(self.thinking)), output)

    def _behind_reasoning(self, output: Format, gap: Format) -> Format:
        if self.thinking is None:
            return sequence(gap, output) if self.follows_reasoning else output
        return sequence(self._optional(sequence(self._reasoning(self.thinking), gap)), output)

    def _text_with_calls(self, tools: Sequence[Tool]) -> Format:
        if self.syntax.starts_output:
            free: Format = {"type": "regex", "pattern": rf"[^\s\{self.syntax.starts_output}](.|\n)*"}
            return either([self._calls(tools, all_strict=False, is_parallel=True), free, NOTHING])
        if self.syntax.around:
            outer = self._calls(tools, all_strict=False, is_parallel=True)
        else:
            outer = self._call(tools, all_strict=False)
        return {"type": "triggered_tags", "triggers": [outer["begin"]], "tags": [outer]}

    def _calls(self, tools: Sequence[Tool], *, all_strict: bool, is_parallel: bool) -> Format:
        calls: Format = {
            "type": "tags_with_separator",
            "tags": [self._call(tools, all_strict=all_strict)],
            "separator": self.syntax.separator,
            "at_least_one": True,
            "stop_after_first": self.syntax.is_single or not is_parallel,
        }
        for begin, end in reversed(self.syntax.around):
            calls = tag(self.marker_of(begin), calls, self.marker_of(end))
        return calls

    def _call(self, tools: Sequence[Tool], *, all_strict: bool) -> Format:
        content = either([self.syntax.content(tool, all_strict or tool.is_strict, self.marker_of) for tool in tools])
        return tag(self.marker_of(self.syntax.begin), content, self.marker_of(self.syntax.end))

    def _reasoning(self, thinking: Thinking) -> Format:
        begin = "" if thinking.is_open else thinking.begin
        reasoning = tag(self.marker_of(begin), ANY_TEXT, self.marker_of(thinking.end))
        return reasoning if thinking.is_open else {**reasoning, "lazy_begin": True}

    def _optional(self, reasoning: Format) -> Format:
        is_open = self.thinking is not None and self.thinking.is_open
        return reasoning if is_open else either([reasoning, NOTHING])


def _begins_with(openings: Sequence[str]) -> str:
    """The pattern of texts that begin so, with any whitespace."""
    choices = [r"\s*".join(["", *map(re.escape, "".join(each.split()))]) for each in openings]
    return rf"({'|'.join(choices)})(.|\n)*"


def _bare_call(tool: Tool, keys: tuple[str, str]) -> Format:
    """A call that is JSON without a marker. Its whitespace is that of the format: the library's lexer cannot follow
    two kinds of whitespace at once."""
    name, arguments = keys
    written = json_arguments(tool, is_strict=tool.is_strict)["json_schema"]
    properties = {name: {"const": tool.name}, arguments: _moved(written, f"#/properties/{arguments}")}
    schema = {"type": "object", "properties": properties, "required": [*keys], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": schema}


def _moved(schema: Any, place: str) -> Any:
    """The schema as a part of another one, at this place."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(each, place) for name, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _without_both(schema: Any, keys: tuple[str, str]) -> Any:
    """The schema without objects that have both keys."""
    if not _allows_both(schema, schema, keys, 0):
        return schema
    others = {"anyOf": [{"properties": {key: False}} for key in keys]}
    given = {} if schema is True else schema
    return {**given, "allOf": [*given.get("allOf", []), others]}


def _allows_both(schema: Any, root: Any, keys: tuple[str, str], depth: int) -> bool:
    """False only if none of the schema's values is an object with both keys."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema is not False
    types = schema.get("type", "object")
    if types != "object" and "object" not in types:
        return False
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return set(keys) <= set(schema.get("properties", ()))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return any(_allows_both(each, root, keys, depth + 1) for each in schema[keyword])
    return "$ref" not in schema or _allows_both(resolve(schema["$ref"], root), root, keys, depth + 1)


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
        raise Unconstrainable(f"{found[0]!r} of the text {quoted(parameter.name)} is not supported for this model")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        texts = [each for each in choices if isinstance(each, str) and closing not in each]
        if not texts:
            raise Unconstrainable(f"no value of {quoted(parameter.name)} can be written")
        return either([text(each) for each in texts])
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    limits = f"{{{least},{'' if most is None else most}}}" if least or most is not None else ""
    char = f"[^{re.escape(excluded)}]"
    if "pattern" in schema:
        if limits:
            raise Unconstrainable(f"the text {quoted(parameter.name)} has a pattern and a length: one is supported")
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
        raise Unconstrainable(f"the pattern of the text {quoted(name)} has alternatives with '^' or '$'")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else char + '*'}({inner}){'' if ends else char + '*'}"


def optional(parameter: Parameter, written: Format) -> Format:
    return written if parameter.is_required else either([written, NOTHING])
