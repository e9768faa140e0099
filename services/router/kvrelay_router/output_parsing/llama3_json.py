"""Llama 3.1 to 3.3: calls are JSON objects at the beginning of the output or behind `<|python_tag|>`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf, json_arguments, tag
from kvrelay_router.output_parsing.json_calls import JsonReader
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, new_call_id
from kvrelay_router.output_parsing.tool import Tool

TAG = "<|python_tag|>"


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    begin = f'"name": {json.dumps(tool.name)}, "parameters": '
    return tag(begin, json_arguments(tool, is_strict=is_strict), "}")


SYNTAX = CallSyntax(begin="{", content=_call, end="", separator="; ", starts_output="{")


class Llama3JsonParser(JsonReader):
    """An object whose name is none of the tools' is content: without a tag, JSON may be the answer."""

    _opens = Markers(TAG)

    def __init__(self, tools: Sequence[Tool], new_id: NewId = new_call_id) -> None:
        super().__init__(TAG, new_id)
        self._names = frozenset(tool.name for tool in tools)

    def _parse(self) -> Steps[None]:
        self._begin_head("")
        if (yield from self._skip_spaces()) == "{":
            yield from self._calls()
        else:
            self._give_up()
        while (yield from self._until(self._opens, self._content)) is not None:
            self._begin_head(TAG)
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        try:
            yield from self._skip_spaces()
            while True:
                yield from self._json_call()
                self._end_call()
                following = yield from self._skip_spaces()
                if following == ";":
                    yield from self._expect(";")
                    yield from self._skip_spaces()
                elif following != "{":
                    break
        except Malformed:
            pass
        self._give_up()

    def _name(self) -> Steps[str]:
        name = yield from super()._name()
        if name not in self._names:
            raise Malformed
        return name
