"""Mistral: behind `[TOOL_CALLS]` comes a JSON list of calls, or, in newer models, a name and its arguments."""

from __future__ import annotations

import json
import re
import secrets
import string

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf, json_arguments, marked, sequence, tag, text
from kvrelay_router.output_parsing.json_calls import JsonReader
from kvrelay_router.output_parsing.parameter_reader import IS_NAME
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps
from kvrelay_router.output_parsing.tool import Tool

TAG, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits
_IS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch


def _listed_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    return tag(f'"name": {json.dumps(tool.name)}, "arguments": ', json_arguments(tool, is_strict=is_strict), "}")


def _named_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    return sequence(text(tool.name), marked(marker_of(ARGUMENTS)), json_arguments(tool, is_strict=is_strict))


LIST_SYNTAX = CallSyntax(begin="{", content=_listed_call, end="", separator=", ", around=((TAG, ""), ("[", "]")))
NAME_SYNTAX = CallSyntax(begin=TAG, content=_named_call, end="", separator="")


def short_call_id() -> str:
    """The chat templates of these models allow no other ids than nine letters and digits."""
    return "".join([secrets.choice(_ALPHABET) for _ in range(9)])


class MistralParser(JsonReader):
    _opens = Markers(TAG)
    _name_ends = Markers(CALL_ID, ARGUMENTS, "{", TAG)
    _id_ends = Markers(ARGUMENTS, "{", TAG)

    def __init__(self, new_id: NewId = short_call_id) -> None:
        super().__init__(TAG, new_id)

    def _parse(self) -> Steps[None]:
        while (yield from self._until(self._opens, self._content)) is not None:
            self._begin_head(TAG)
            try:
                first = yield from self._skip_spaces()
                if first == "[":
                    yield from self._list()
                elif first == "{":
                    yield from self._json_call()
                else:
                    yield from self._named_call()
            except Malformed:
                self._give_up()
            else:
                self._end_call()

    def _list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._skip_spaces()
            yield from self._json_call()
            self._end_call()
            yield from self._skip_spaces()
            if (yield from self._skip("]")):
                return
            yield from self._expect(",")

    def _named_call(self) -> Steps[None]:
        name, end = yield from self._upto(self._name_ends)
        call_id = None
        if end == CALL_ID:
            call_id, end = yield from self._upto(self._id_ends)
            if not _IS_ID(call_id):
                raise Malformed
        if not IS_NAME(name):
            raise Malformed
        self._begin_call(name, call_id)
        yield from self._skip_spaces()
        self._drop_head()
        yield from self._value(self._arguments)

    def _upto(self, ends: Markers) -> Steps[tuple[str, str]]:
        """A short text and the marker behind it, which stays unread if it belongs to what follows."""
        text, end = yield from self._short_text(ends)
        if end in ("{", TAG):
            self._at -= len(end)
            self._head.pop()
            self._head_chars -= len(end)
        if end == TAG:
            raise Malformed
        return text.strip(), end
