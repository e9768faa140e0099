"""Grammars of outputs with calls that follow their tools' schemas, as structural tags: `kvrelay.grammar.tag_format`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.text.output_parsing.events import Tool

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
    return {"type": "json_schema", "json_schema": schema}


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
            return json_value(json.loads(grammar.text))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.CHOICE:
            choices = " | ".join(map(json.dumps, json.loads(grammar.text)))
            return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case GrammarKind.GRAMMAR:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            written = json.loads(grammar.text)
            return written["format"] if "format" in written else _triggered(written)


def _triggered(written: dict[str, Any]) -> Format:
    tags = [tag(each["begin"], json_value(each["schema"]), each["end"]) for each in written["structures"]]
    return {"type": "triggered_tags", "triggers": written["triggers"], "tags": tags}


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls: each is `begin`, what `content` returns for the tool, and `end`, and several have
    `separator` between them. `content` also gets whether the call must follow the tool's schema.

    `around`: pairs of markers around all calls, the outer ones first. `starts_output`: calls stand at the beginning of
    an output alone; then its first characters, which are `begin` or the first of `around`, are no free text.
    """

    begin: str
    content: Callable[[Tool, bool, MarkerOf], Format]
    end: str
    separator: str
    around: tuple[tuple[str, str], ...] = ()
    starts_output: str = ""


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
        calls = self._calls(tools, all_strict=True, is_parallel=is_parallel)
        gap = either([text("\n" * count) for count in range(3)])
        if self.thinking is None:
            return sequence(gap, calls) if self.follows_reasoning else calls
        return sequence(self._optional(sequence(self._reasoning(self.thinking), gap)), calls)

    def allowed(self, tools: Sequence[Tool]) -> Format:
        """The output is free text in which calls may stand. Those of strict tools follow their schemas."""
        output = self._text_with_calls(tools)
        if self.thinking is None:
            return output
        return sequence(self._optional(self._reasoning(self.thinking)), output)

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
            "stop_after_first": not is_parallel,
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
