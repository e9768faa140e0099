"""DeepSeek V3 and R1: the name in one line, then the arguments in a block of code. V3.1: the name and the arguments."""

from __future__ import annotations

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.call_sections import SectionMarkers, SectionReader
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf, json_arguments, marked, sequence, tag, text
from kvrelay_router.output_parsing.parameter_reader import IS_NAME
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, new_call_id
from kvrelay_router.output_parsing.tool import Tool

# ruff: noqa: RUF001 - the markers have such characters
MARKERS = SectionMarkers(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
SEPARATOR = "<｜tool▁sep｜>"
BLOCK, BLOCK_END = "```json", "```"


def _block_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    arguments = json_arguments(tool, is_strict=is_strict)
    block = tag(f"{tool.name}\n{BLOCK}\n", arguments, f"\n{BLOCK_END}")
    return sequence(text("function"), marked(marker_of(SEPARATOR)), block)


def _bare_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    return sequence(text(tool.name), marked(marker_of(SEPARATOR)), json_arguments(tool, is_strict=is_strict))


_AROUND = ((MARKERS.begin, MARKERS.end),)
BLOCK_SYNTAX = CallSyntax(
    begin=MARKERS.call_begin, content=_block_call, end=MARKERS.call_end, separator="\n", around=_AROUND
)
BARE_SYNTAX = CallSyntax(
    begin=MARKERS.call_begin, content=_bare_call, end=MARKERS.call_end, separator="", around=_AROUND
)


class DeepSeekParser(SectionReader):
    """Reads the calls of all versions."""

    _separators = Markers(SEPARATOR, MARKERS.call_end)
    _lines = Markers("\n", MARKERS.call_end)

    def __init__(self, new_id: NewId = new_call_id) -> None:
        super().__init__(MARKERS, new_id)

    def _call(self) -> Steps[None]:
        name, end = yield from self._short_text(self._separators)
        if end != SEPARATOR:
            raise Malformed
        is_block = (yield from self._skip_spaces()) != "{"
        if is_block:
            name, end = yield from self._short_text(self._lines)
            yield from self._skip_spaces()
            if end != "\n" or not (yield from self._skip(BLOCK)):
                raise Malformed
            yield from self._skip_spaces()
        if not IS_NAME(name.strip()):
            raise Malformed
        self._begin_call(name.strip())
        yield from self._value(self._arguments)
        if is_block:
            yield from self._skip_spaces()
            yield from self._expect(BLOCK_END)
