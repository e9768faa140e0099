"""Hermes 2 and 3, Qwen 2.5 and Qwen 3: each call is a JSON object in `<tool_call>` tags."""

from __future__ import annotations

import json

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf, json_arguments, tag
from kvrelay_router.output_parsing.json_calls import JsonReader
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, new_call_id
from kvrelay_router.output_parsing.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    begin = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return tag(begin, json_arguments(tool, is_strict=is_strict), "}\n")


SYNTAX = CallSyntax(begin=OPEN, content=_call, end=CLOSE, separator="\n")


class HermesParser(JsonReader):
    _opens = Markers(OPEN)

    def __init__(self, new_id: NewId = new_call_id) -> None:
        super().__init__(CLOSE, new_id)

    def _parse(self) -> Steps[None]:
        while (yield from self._until(self._opens, self._content)) is not None:
            self._begin_head(OPEN)
            try:
                yield from self._skip_spaces()
                yield from self._json_call()
                yield from self._skip_spaces()
                yield from self._expect(CLOSE)
            except Malformed:
                self._give_up()
            else:
                self._end_call()
