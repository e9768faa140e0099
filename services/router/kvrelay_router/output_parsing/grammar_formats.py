"""The formats of structural tags that grammars of outputs consist of: `kvrelay.grammar.tag_format`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay_router.output_parsing.tool import Tool

Format = dict[str, Any]
Marker = str | Format
"""A text, or the format of a token, which is no text for grammars."""
MarkerOf = Callable[[str], Marker]
"""Returns the format of a token for the text of an added token, and other texts as they are."""

ANY_TEXT: Format = {"type": "any_text"}
NOTHING: Format = {"type": "const_string", "value": ""}
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
