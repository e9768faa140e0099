"""Qwen3-Coder and later models of Qwen: each call is an element `<function=...>` with one element for each argument."""

from __future__ import annotations

from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.grammar_formats import ANY_TEXT, Format, MarkerOf, json_value, sequence, tag, text
from kvrelay_router.output_parsing.parameter_grammar import bare_value, optional, parameters_of
from kvrelay_router.output_parsing.parameter_reader import ParameterReader
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, Steps
from kvrelay_router.output_parsing.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALL_END = f"{FUNCTION_END}\n{CLOSE}"
BEHIND_VALUES = {PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSE), CALL_END: (OPEN,)}


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    begin = f"\n{FUNCTION}{tool.name}>\n"
    if not is_strict:
        return sequence(text(begin), ANY_TEXT)
    arguments: list[Format] = []
    for parameter in parameters_of(tool):
        value = bare_value(tool, parameter, PARAMETER_END, "<\n") or json_value(parameter.schema)
        end = PARAMETER_END if value == ANY_TEXT else f"\n{PARAMETER_END}"  # free text writes its line break itself
        written = tag(f"{PARAMETER}{parameter.name}>\n", value, end)
        arguments.append(optional(parameter, sequence(written, text("\n"))))
    return sequence(text(begin), *arguments, text(f"{FUNCTION_END}\n"))


SYNTAX = CallSyntax(begin=OPEN, content=_call, end=CLOSE, separator="\n")


class Qwen3CoderParser(ParameterReader):
    """Without `<tool_call>`, which these models forget at times, a call must be of one of the tools."""

    _opens = Markers(OPEN, FUNCTION)
    _name_ends = Markers(">", "\n")
    _value_ends = Markers(PARAMETER_END, CALL_END)

    def _parse(self) -> Steps[None]:
        while (opened := (yield from self._until(self._opens, self._content))) is not None:
            self._begin_head(opened)
            try:
                if opened == OPEN:
                    yield from self._skip_spaces()
                    yield from self._expect(FUNCTION)
                yield from self._call(must_be_known=opened != OPEN)
            except Malformed:
                self._give_up()
            else:
                self._end_call()

    def _call(self, *, must_be_known: bool) -> Steps[None]:
        name, end = yield from self._short_text(self._name_ends)
        name = name.strip()
        if end != ">" or (must_be_known and name not in self._tools):
            raise Malformed
        self._begin_parameters(name)
        while True:
            yield from self._skip_spaces()
            if not (yield from self._skip(PARAMETER)):
                break
            key, end = yield from self._short_text(self._name_ends)
            if end != ">":
                raise Malformed
            end = yield from self._argument_text(key.strip(), self._value_ends, BEHIND_VALUES, in_lines=True)
            if end != PARAMETER_END:
                self._end_parameters()
                return
        yield from self._expect(FUNCTION_END)
        self._end_parameters()
        yield from self._skip_spaces()
        if (yield from self._skip(CLOSE)):
            self._drop_head()
        else:
            self._give_up()
