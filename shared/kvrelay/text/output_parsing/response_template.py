"""Outputs that a `response_template` of the tokenizer describes, divided by transformers' parser of such templates.

The parser finds the regions of a message. Their contents are parsed here: transformers would raise an error for a
malformed call, and the text would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec

from kvrelay.text.output_parsing.argument_values import is_json_object, types_of, written_json
from kvrelay.text.output_parsing.events import (
    ArgumentsDelta,
    ContentText,
    Event,
    ReasoningText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from kvrelay.text.output_parsing.parser_base import new_call_id

CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "thinking", "reasoning")
AS_TEXT = ("xml-inline", "kv-lines")
"""Ways of writing arguments in which all values are texts."""

_OPEN, _BODY = "kvrelay_open", "kvrelay_body"


class BadResponseTemplate(ValueError):
    """The template cannot be used. The message has the reason."""


class ResponseTemplate(msgspec.Struct, frozen=True):
    """`divider`: the template with texts in all regions, and with what opened a region. `calls`: how calls are read;
    None if the template has none."""

    divider: Any
    calls: Any

    def begun_message(self, prompt_end: str) -> str:
        """What the prompt has written of the message. Empty if the beginning of the message is not there."""
        if self.divider.start_anchor_re.search(prompt_end) is None:
            return ""
        return str(self.divider.truncate_past_last_anchor(prompt_end))


def load_response_template(spec: Any) -> ResponseTemplate:
    """Raises BadResponseTemplate."""
    from transformers.utils.chat_parsing import response_templates  # only for models that have one: it takes a second

    try:
        loaded = response_templates.load_response_template(spec)
        fields = {name: _as_text(field) for name, field in loaded.fields.items()}
    except Exception as error:
        raise BadResponseTemplate(f"{type(error).__name__}: {error}") from error
    return ResponseTemplate(replace(loaded, fields=fields), loaded.fields.get(CALLS))


def _as_text(field: Any) -> Any:
    if field.name != CALLS:
        return replace(field, content="text", content_args={"strip": False}, transform=None, join=None, optional=True)
    opening = field.open_re
    if opening is not None:
        compiled = import_module("regex").compile  # which transformers brings; it has no types
        opening = compiled(f"(?P<{_OPEN}>{opening.pattern})", opening.flags)
    names = [] if opening is None else list(opening.groupindex)
    transform = {_BODY: "{content}", **{name: f"{{{name}}}" for name in names}}
    return replace(
        field,
        open_re=opening,
        content="text",
        content_args={"strip": False},
        transform=transform,
        transform_each=False,
        join=None,
        optional=True,
    )


class ResponseTemplateParser:
    """An `OutputParser`. A call comes at its end: only then it can be read. What the template has in no field is
    dropped; a malformed call is content."""

    def __init__(self, template: ResponseTemplate, tools: Sequence[Tool], prompt_end: str) -> None:
        """`prompt_end`: with the beginning of the message."""
        from transformers.utils.chat_parsing import ResponseParser

        self._template = template
        self._tools = {tool.name: tool for tool in tools}
        self._parser = ResponseParser(template.divider, prefix="")
        if begun := template.begun_message(prompt_end):
            self._parser.feed(begun)
        self._num_calls = 0
        self._has_text = False  # the region has more than whitespace
        self._spaces = ""  # whitespace at the end of the region, dropped if nothing follows
        self._events: list[Event] = []
        self._is_broken = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._is_broken:
            return [ContentText(text)]
        try:
            regions = self._parser.feed(text)
        except Exception:  # a pattern or group that the template should not have
            self._is_broken = True
            return [ContentText(text)]
        return self._taken(regions)

    def finish(self) -> list[Event]:
        if self._is_broken:
            return []
        try:
            _, regions = self._parser.finalize()
        except Exception:
            return []
        return self._taken(regions)

    def _taken(self, regions: Sequence[Mapping[str, Any]]) -> list[Event]:
        for region in regions:
            field = region["field"]
            if region["type"] != "region_chunk":
                self._has_text, self._spaces = False, ""
            if region["type"] == "region_close" and field == CALLS:
                self._call(region["value"])
            elif region["type"] == "region_chunk" and field != CALLS:
                self._text(field, region["text"])
        events, self._events = self._events, []
        return events

    def _text(self, field: str, text: str) -> None:
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :] if self._has_text or kept else ""
        kept = kept if self._has_text else kept.lstrip()
        if not kept:
            return
        self._has_text = True
        if field in REASONING:
            self._events.append(ReasoningText(kept))
        elif field == CONTENT:
            self._events.append(ContentText(kept))

    def _call(self, region: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.content_parsers import process_field

        captures = {name: value for name, value in region.items() if name not in (_OPEN, _BODY)}
        body = region[_BODY]
        try:
            value = process_field(body, self._template.calls, captures)
            calls = [self._read(each) for each in (value if isinstance(value, list) else [value])]
            if not all(is_json_object(arguments) for _, arguments in calls):
                calls = []
        except Exception:  # each kind of content raises its own
            calls = []
        if calls and self._tools:
            for name, arguments in calls:
                index, self._num_calls = self._num_calls, self._num_calls + 1
                call = ToolCallBegun(index, new_call_id(), name), ArgumentsDelta(index, arguments)
                self._events += [*call, ToolCallEnded(index)]
        else:
            self._events.append(ContentText(region.get(_OPEN, "") + body + self._closing()))

    def _closing(self) -> str:
        literals = self._template.calls.close_literals
        return literals[0] if literals and len(literals) == 1 else ""

    def _read(self, call: Any) -> tuple[str, str]:
        """The name and the arguments of a call. Raises an error if it has no name."""
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or not name:
            raise ValueError("the call has no name")
        return name, self._arguments(name, arguments)

    def _arguments(self, name: str, arguments: Any) -> str:
        if isinstance(arguments, str):
            return arguments or "{}"
        if isinstance(arguments, dict) and self._template.calls.content in AS_TEXT:
            schema = self._tools[name].parameters if name in self._tools else {}
            written = [f"{_json(key)}: {_typed(key, value, schema)}" for key, value in arguments.items()]
            return "{" + ", ".join(written) + "}"
        return _json({} if arguments is None else arguments)


def _typed(key: str, value: Any, schema: Mapping[str, Any]) -> str:
    """A value that the model has written as text, as the tool's schema wants it."""
    if not isinstance(value, str):
        return _json(value)
    part = (schema.get("properties") or {}).get(key)
    return written_json(value, types_of(part, schema))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
