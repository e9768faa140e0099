"""Grammars of outputs with calls that follow their tools' schemas, as structural tags: `kvrelay.grammar.tag_format`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrelay_router.output_parsing.tool import Tool

Format = dict[str, Any]
Marker = str | Format
"""A text, or the format of a token, which is no text for grammars."""

WHITESPACE = " ?"
"""Between the tokens of JSON in arguments: a weak model would fill calls with spaces."""
ANY_TEXT: Format = {"type": "any_text"}
NOTHING: Format = {"type": "const_string", "value": ""}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes a call: `begin`, what `content` returns for the tool's name and the format of its arguments,
    and `end`. Several calls have `separator` between them."""

    begin: str
    content: Callable[[str, Format], Format]
    end: str
    separator: str


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning comes before the calls. `is_open`: the prompt has written `begin`."""

    begin: str
    end: str
    is_open: bool


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Writes the formats of a model's outputs. `marker_of`: returns the format of a token for the text of an added
    token, and other texts as they are."""

    syntax: CallSyntax
    thinking: Thinking | None
    marker_of: Callable[[str], Marker]

    def required(self, tools: Sequence[Tool], *, is_parallel: bool) -> Format:
        """The output is a call of these tools, or several if they may be parallel, behind the reasoning if there is
        any. All follow their schemas."""
        calls = {
            "type": "tags_with_separator",
            "tags": [self._call(tools, all_strict=True)],
            "separator": self.syntax.separator,
            "at_least_one": True,
            "stop_after_first": not is_parallel,
        }
        if self.thinking is None:
            return calls
        gap = {"type": "or", "elements": [{"type": "const_string", "value": "\n" * count} for count in range(3)]}
        return _sequence(self._optional(_sequence(self._reasoning(self.thinking), gap)), calls)

    def allowed(self, tools: Sequence[Tool]) -> Format:
        """The output is free text in which calls may stand. Those of strict tools follow their schemas."""
        begin = self.marker_of(self.syntax.begin)
        calls = {"type": "triggered_tags", "triggers": [begin], "tags": [self._call(tools, all_strict=False)]}
        if self.thinking is None:
            return calls
        return _sequence(self._optional(self._reasoning(self.thinking)), calls)

    def _call(self, tools: Sequence[Tool], *, all_strict: bool) -> Format:
        choices = [self.syntax.content(tool.name, _arguments(tool, all_strict or tool.is_strict)) for tool in tools]
        content = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
        return self._tag(self.syntax.begin, content, self.syntax.end)

    def _reasoning(self, thinking: Thinking) -> Format:
        tag = self._tag("" if thinking.is_open else thinking.begin, ANY_TEXT, thinking.end)
        return tag if thinking.is_open else {**tag, "lazy_begin": True}

    def _optional(self, reasoning: Format) -> Format:
        is_open = self.thinking is not None and self.thinking.is_open
        return reasoning if is_open else {"type": "or", "elements": [reasoning, NOTHING]}

    def _tag(self, begin: str, content: Format, end: str) -> Format:
        return {"type": "tag", "begin": self.marker_of(begin), "content": content, "end": self.marker_of(end)}


def _sequence(*formats: Format) -> Format:
    return {"type": "sequence", "elements": list(formats)}


def _arguments(tool: Tool, is_strict: bool) -> Format:
    schema: dict[str, Any] = {"type": "object"}
    if is_strict:
        schema = {"type": "object", **tool.parameters} if tool.parameters else NO_ARGUMENTS
    return {"type": "json_schema", "json_schema": schema}
