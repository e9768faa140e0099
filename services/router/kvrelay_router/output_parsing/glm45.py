"""GLM 4.5 and later: each call is a name with pairs of `<arg_key>` and `<arg_value>` in `<tool_call>` tags."""

from __future__ import annotations

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.grammar_formats import (
    ANY_TEXT,
    Format,
    MarkerOf,
    json_value,
    marked,
    sequence,
    tag,
    text,
)
from kvrelay_router.output_parsing.parameter_grammar import bare_value, optional, parameters_of
from kvrelay_router.output_parsing.parameter_reader import ParameterReader
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, Steps
from kvrelay_router.output_parsing.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
BEHIND_VALUES = {VALUE_END: (KEY, CLOSE)}


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    if not is_strict:
        return sequence(text(f"{tool.name}\n"), ANY_TEXT)
    arguments: list[Format] = []
    for parameter in parameters_of(tool):
        value = bare_value(tool, parameter, VALUE_END, "<") or json_value(parameter.schema)
        key = marked(marker_of(KEY)), text(parameter.name), marked(marker_of(KEY_END)), text("\n")
        pair = sequence(*key, tag(marker_of(VALUE), value, marker_of(VALUE_END)), text("\n"))
        arguments.append(optional(parameter, pair))
    return sequence(text(f"{tool.name}\n"), *arguments)


SYNTAX = CallSyntax(begin=OPEN, content=_call, end=CLOSE, separator="\n")


class Glm45Parser(ParameterReader):
    _opens = Markers(OPEN)
    _name_ends = Markers(KEY, CLOSE)
    _key_ends = Markers(KEY_END, CLOSE)
    _value_ends = Markers(VALUE_END)

    def _parse(self) -> Steps[None]:
        while (yield from self._until(self._opens, self._content)) is not None:
            self._begin_head(OPEN)
            try:
                yield from self._call()
            except Malformed:
                self._give_up()
            else:
                self._end_call()

    def _call(self) -> Steps[None]:
        name, marker = yield from self._short_text(self._name_ends)
        self._begin_parameters(name.strip())
        while marker == KEY:
            key, end = yield from self._short_text(self._key_ends)
            if end != KEY_END:
                raise Malformed
            yield from self._skip_spaces()
            yield from self._expect(VALUE)
            yield from self._argument_text(key.strip(), self._value_ends, BEHIND_VALUES, in_lines=False)
            yield from self._skip_spaces()
            if not (yield from self._skip(KEY)):
                yield from self._expect(CLOSE)
                break
        self._end_parameters()
