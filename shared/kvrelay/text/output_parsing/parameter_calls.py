"""Reads calls whose arguments are written one by one, each with its name, and writes them as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvrelay.text.output_parsing.argument_values import ANY_TYPE, STRING, Types, quoted, types_of, written_json
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.parser_base import IS_NAME, CallParser, Malformed, Markers, NoCall, Steps, Write

MAX_GAP_CHARS = 256
"""Whitespace behind the end of a value. With more, the end belongs to the value."""
MAX_MARKER_CHARS = 32


class ParameterReader(CallParser):
    """The schemas of `tools` tell which values are texts; others are JSON, or literals of Python."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._called: Tool | None = None
        self._num_arguments = 0

    def _begin_parameters(self, name: str) -> None:
        """Begins a call. Raises Malformed if this is no name."""
        if not IS_NAME(name):
            raise Malformed
        self._called = self._tools.get(name)
        self._num_arguments = 0
        self._begin_call(name)

    def _end_parameters(self) -> None:
        """The arguments are complete."""
        self._arguments("}" if self._num_arguments else "{}")

    def _is_cut(self) -> bool:
        """With the end of a call in it, the last value has no end because the call is malformed."""
        return super()._is_cut() and not (self._stop and self._stop in self._head_text())

    def _types(self, key: str) -> Types:
        parameters = {} if self._called is None else self._called.parameters
        properties = parameters.get("properties")
        if not isinstance(properties, dict) or key not in properties:
            return ANY_TYPE
        return types_of(properties[key], parameters)

    def _begin_argument(self, key: str) -> None:
        self._arguments(f"{', ' if self._num_arguments else '{'}{quoted(key)}: ")
        self._num_arguments += 1

    def _argument_text(
        self, key: str, types: Types, ends: Markers, following: Mapping[str, Sequence[str]], *, in_lines: bool = False
    ) -> Steps[str]:
        """Reads a value and the marker behind it, which it returns. A marker belongs to the value unless one of
        `following` comes next, or the end of the output. `in_lines`: a line break on each side is none of the value's.
        Raises Malformed at the end of the output."""
        self._begin_argument(key)
        pieces = _StringPieces(self._arguments) if types == STRING else _Pieces()
        if in_lines:
            yield from self._skip("\n")
        marker = yield from self._until(ends, pieces.add)
        while marker is not None and not (yield from self._is_followed(following[marker])):
            pieces.add(marker)
            marker = yield from self._until(ends, pieces.add)
        if marker is None:
            self._arguments(pieces.cut())
            raise Malformed
        self._arguments(pieces.end(types, in_lines=in_lines))
        return marker

    def _is_followed(self, expected: Sequence[str]) -> Steps[bool]:
        """Whether whitespace and one of these come next, or the end of the output. Reads nothing."""
        while True:
            seen = self._text[self._at : self._at + MAX_GAP_CHARS + MAX_MARKER_CHARS]
            rest = seen.lstrip()
            if len(seen) - len(rest) >= MAX_GAP_CHARS:
                return False
            if any(rest.startswith(each) for each in expected):
                return True
            if not any(each.startswith(rest) for each in expected):
                return False
            if not (yield from self._more()):
                return True


class _Pieces:
    """Keeps a value until it is complete."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def add(self, text: str) -> None:
        self._kept.append(text)

    def cut(self) -> str:
        """Returns the received text of a value whose end is missing."""
        return "".join(self._kept)

    def end(self, types: Types, *, in_lines: bool) -> str:
        text = "".join(self._kept)
        return written_json(text.removesuffix("\n") if in_lines else text, types)


class _StringPieces(_Pieces):
    """Writes a text while it comes."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write
        self._write('"')

    def add(self, text: str) -> None:
        """The last line break may belong to the syntax."""
        text = "".join(self._kept) + text
        kept = text.removesuffix("\n")
        self._kept = ["\n"] if len(kept) < len(text) else []
        self._write(quoted(kept)[1:-1])

    def cut(self) -> str:
        return quoted("".join(self._kept))[1:-1]

    def end(self, types: Types, *, in_lines: bool) -> str:
        return '"' if in_lines else self.cut() + '"'


class Glm45Parser(ParameterReader):
    """GLM 4.5 and later: each call is a name with pairs of `<arg_key>` and `<arg_value>` in `<tool_call>` tags."""

    open, close = "<tool_call>", "</tool_call>"
    key, key_end, value, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    _opens = Markers(open)
    _stop = close
    _name_ends = Markers(key, close, open)
    _key_ends = Markers(key_end, close)
    _value_ends = Markers(value_end)
    _behind_values: ClassVar = {value_end: (key, close)}

    def _call(self, opened: str) -> Steps[None]:
        name, marker = yield from self._short_text(self._name_ends)
        if marker == self.open:
            self._at -= len(marker)
            raise NoCall
        self._begin_parameters(name.strip())
        while marker == self.key:
            key, end = yield from self._short_text(self._key_ends)
            if end != self.key_end:
                raise Malformed
            yield from self._skip_spaces()
            yield from self._expect(self.value)
            key = key.strip()
            yield from self._argument_text(key, self._types(key), self._value_ends, self._behind_values)
            yield from self._skip_spaces()
            if not (yield from self._skip(self.key)):
                yield from self._expect(self.close)
                break
        self._end_parameters()


class Qwen3CoderParser(ParameterReader):
    """Qwen3-Coder and later models of Qwen: each call is an element `<function=...>` with one element for each
    argument. Without `<tool_call>`, which these models forget at times, a call must be of one of the tools."""

    open, close = "<tool_call>", "</tool_call>"
    function, function_end = "<function=", "</function>"
    parameter, parameter_end = "<parameter=", "</parameter>"
    _opens = Markers(open, function)
    _stop = close
    _name_ends = Markers(">", "\n")
    call_end = f"{function_end}\n{close}"
    _value_ends = Markers(parameter_end, call_end)
    _behind_values: ClassVar = {parameter_end: (parameter, function_end, close), call_end: (open,)}

    def _call(self, opened: str) -> Steps[None]:
        if opened == self.open:
            yield from self._skip_spaces()
            if not (yield from self._skip(self.function)):
                raise NoCall
        name, end = yield from self._short_text(self._name_ends)
        name = name.strip()
        if opened != self.open and (end != ">" or name not in self._tools):
            raise NoCall
        if end != ">":
            raise Malformed
        self._begin_parameters(name)
        while True:
            yield from self._skip_spaces()
            if not (yield from self._skip(self.parameter)):
                break
            key, end = yield from self._short_text(self._name_ends)
            if end != ">":
                raise Malformed
            key = key.strip()
            end = yield from self._argument_text(
                key, self._types(key), self._value_ends, self._behind_values, in_lines=True
            )
            if end != self.parameter_end:
                raise Malformed
        yield from self._expect(self.function_end)
        self._end_parameters()
        self._commit()
        yield from self._skip_spaces()
        if not (yield from self._skip(self.close)):
            raise NoCall


class SeedOssParser(Qwen3CoderParser):
    """Seed-OSS: the same in other tags."""

    open, close = "<seed:tool_call>", "</seed:tool_call>"
    _opens = Markers(open, Qwen3CoderParser.function)
    _stop = close
    call_end = f"{Qwen3CoderParser.function_end}\n{close}"
    _value_ends = Markers(Qwen3CoderParser.parameter_end, call_end)
    _behind_values: ClassVar = {
        Qwen3CoderParser.parameter_end: (Qwen3CoderParser.parameter, Qwen3CoderParser.function_end, close),
        call_end: (open,),
    }


class MinimaxM2Parser(ParameterReader):
    """MiniMax M2: calls are elements `<invoke name="...">` in a section, with an element for each argument."""

    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    invoke, invoke_end = '<invoke name="', "</invoke>"
    parameter, parameter_end = '<parameter name="', "</parameter>"
    name_end = '">'
    _opens = Markers(open)
    _stop = close
    _name_ends = Markers(name_end)
    _key_ends = Markers(name_end)
    _value_ends = Markers(parameter_end)
    _behind_values: ClassVar = {parameter_end: (parameter, invoke_end)}

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        if not (yield from self._skip(self.invoke)):
            raise NoCall
        while True:
            yield from self._invocation()
            self._commit()
            yield from self._skip_spaces()
            if (yield from self._skip(opened.replace("<", "</"))):
                return
            if not (yield from self._skip(self.invoke)):
                raise NoCall

    def _invocation(self) -> Steps[None]:
        name, _ = yield from self._short_text(self._name_ends)
        self._begin_parameters(name)
        while (yield from self._skip_spaces()) and (yield from self._skip(self.parameter)):
            key, end = yield from self._short_text(self._key_ends)
            types = self._types_of(key, end)
            yield from self._argument_text(key, types, self._value_ends, self._behind_values)
        yield from self._expect(self.invoke_end)
        self._end_parameters()

    def _types_of(self, key: str, key_end: str) -> Types:
        return self._types(key)


class DeepSeekV32Parser(MinimaxM2Parser):
    """DeepSeek V3.2 and V4: the same with a mark in each tag. A parameter says whether its value is a text."""

    # ruff: noqa: RUF001 - the mark has such characters
    mark = "｜DSML｜"
    open, open_v4, close = f"<{mark}function_calls>", f"<{mark}tool_calls>", f"</{mark}function_calls>"
    invoke, invoke_end = f'<{mark}invoke name="', f"</{mark}invoke>"
    parameter, parameter_end = f'<{mark}parameter name="', f"</{mark}parameter>"
    text_end, value_end = '" string="true">', '" string="false">'
    _opens = Markers(open, open_v4)
    _stop = close
    _key_ends = Markers(text_end, value_end)
    _value_ends = Markers(parameter_end)
    _behind_values: ClassVar = {parameter_end: (parameter, invoke_end)}

    def _types_of(self, key: str, key_end: str) -> Types:
        return STRING if key_end == self.text_end else (self._types(key) - STRING) or ANY_TYPE
