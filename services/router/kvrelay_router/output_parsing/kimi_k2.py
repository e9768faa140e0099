"""Kimi K2: the id of a call names its function, as in `functions.NAME:0`."""

from __future__ import annotations

import re

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.call_sections import SectionMarkers, SectionReader
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf, json_arguments, marked, sequence, text
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, new_call_id
from kvrelay_router.output_parsing.tool import Tool

MARKERS = SectionMarkers(
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"
)
ARGUMENTS = "<|tool_call_argument_begin|>"
FUNCTIONS = "functions."
_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_.-]{1,256}?)(?::\d+)?").fullmatch


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    number: Format = {"type": "regex", "pattern": "[0-9]{1,4}"}
    arguments = json_arguments(tool, is_strict=is_strict)
    return sequence(text(f"{FUNCTIONS}{tool.name}:"), number, marked(marker_of(ARGUMENTS)), arguments)


SYNTAX = CallSyntax(
    begin=MARKERS.call_begin,
    content=_call,
    end=MARKERS.call_end,
    separator="",
    around=((MARKERS.begin, MARKERS.end),),
)


class KimiK2Parser(SectionReader):
    """Ids are kept: the chat template shows them to the model again. One that the output has already gets the next free
    number, as clients tell calls apart by their ids."""

    _separators = Markers(ARGUMENTS, MARKERS.call_end)

    def __init__(self, new_id: NewId = new_call_id) -> None:
        super().__init__(MARKERS, new_id)

    def _unused(self, call_id: str, name: str) -> str:
        number = self._num_calls
        while call_id in self._ids:
            call_id, number = f"{FUNCTIONS}{name}:{number}", number + 1
        return call_id

    def _call(self) -> Steps[None]:
        call_id, end = yield from self._short_text(self._separators)
        call_id = call_id.strip()
        found = _ID(call_id)
        if end != ARGUMENTS or found is None:
            raise Malformed
        self._begin_call(found[1], self._unused(call_id, found[1]))
        yield from self._skip_spaces()
        self._drop_head()
        yield from self._value(self._arguments)
