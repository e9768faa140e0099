"""Llama 3.2 and 4 with pythonic calls: the output is a Python list of calls, as in `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import string
from collections.abc import Sequence

from kvrelay.excerpts import shortened
from kvrelay.text.output_parsing.argument_values import IS_NUMBER, STRING, Types, in_range, quoted, written_json
from kvrelay.text.output_parsing.call_grammar import (
    NOTHING,
    CallSyntax,
    Format,
    MarkerOf,
    Parameter,
    Unconstrainable,
    either,
    json_value,
    optional,
    parameters_of,
    sequence,
    tag,
    text,
)
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.parameter_calls import ParameterReader
from kvrelay.text.output_parsing.parser_base import Malformed, Markers, NoCall, Steps, Write

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64
MAX_CODE_POINT = 0x10FFFF

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*").fullmatch
_WORD_END = re.compile(r"[\s,)\]}:=('\"\[{]").search
_IN_STRING = {quote: re.compile(rf"[{quote}\\\n\r\0]").search for quote in "\"'"}
_NUMBER = re.compile(r"[-+]?[0-9.][0-9A-Za-z_.]*([eE][-+]?[0-9_]+)?").fullmatch
_INTEGER = re.compile(r"-?[0-9]+").fullmatch
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = dict(zip("ntrbfav\n\\'\"/", ("\n", "\t", "\r", "\b", "\f", "\a", "\v", "", *"\\'\"/"), strict=True))
_HEX_DIGITS = {"x": 2, "U": 8}
_OCTAL = "01234567"
_CLOSING = {"[": "]", "(": ")"}


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    """Writes required arguments first, so that a comma precedes each optional one."""
    parameters = parameters_of(tool)
    for parameter in parameters:
        if not _NAME(parameter.name):
            raise Unconstrainable(f"{shortened(repr(parameter.name))} is no name of an argument in Python")
    required = [each for each in parameters if each.is_required]
    others = [each for each in parameters if not each.is_required]
    if required:
        written = [_argument(each, "" if each is required[0] else ", ") for each in required]
        arguments = sequence(*written, *_behind(others))
    else:
        arguments = _some(others)
    return sequence(text(f"{tool.name}("), arguments, text(")"))


def _argument(parameter: Parameter, separator: str) -> Format:
    return tag(f"{separator}{parameter.name}=", json_value(parameter.schema), "")


def _behind(parameters: Sequence[Parameter]) -> list[Format]:
    return [optional(each, _argument(each, ", ")) for each in parameters]


def _some(parameters: Sequence[Parameter]) -> Format:
    """Any of the optional arguments, or none."""
    starts = [sequence(_argument(each, ""), *_behind(parameters[place + 1 :])) for place, each in enumerate(parameters)]
    return either([*starts, NOTHING])


SYNTAX = CallSyntax(begin="", content=_call, end="", separator=", ", around=(("[", "]"),), starts_output="[")


class PythonicParser(ParameterReader):
    """All that Python does not read as a list of calls of the tools with literals is content. Constants may be JSON's,
    and names of arguments those of the schema."""

    _opens = Markers(START)
    _first = "["

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        if not (yield from self._skip("[")):
            raise NoCall
        yield from self._skip_spaces()
        while True:
            yield from self._function_call()
            self._end_call()
            if (yield from self._next_of("]")):
                break
        if not (yield from self._skip(END)) and (yield from self._skip_spaces()):
            yield from self._expect(END)

    def _next_of(self, closing: str) -> Steps[bool]:
        """Reads what is behind an element. Returns whether it was the last one."""
        if (yield from self._skip_spaces()) != closing:
            yield from self._expect(",")
            if (yield from self._skip_spaces()) != closing:
                return False
        self._read(1)
        return True

    def _function_call(self) -> Steps[None]:
        name = yield from self._word()
        if name not in self._tools:
            raise Malformed
        yield from self._expect("(")
        self._begin_parameters(name)
        names: set[str] = set()
        is_last = (yield from self._skip_spaces()) == ")" and (yield from self._skip(")"))
        while not is_last:
            key = yield from self._word()
            yield from self._skip_spaces()
            if key in names or not self._is_argument(name, key):
                raise Malformed
            names.add(key)
            yield from self._expect("=")
            yield from self._skip_spaces()
            yield from self._argument(key)
            is_last = yield from self._next_of(")")
        self._end_parameters()

    def _is_argument(self, name: str, key: str) -> bool:
        is_known = key in self._tools[name].parameters.get("properties", {})
        return bool(_NAME(key)) and (is_known or (key.isidentifier() and not keyword.iskeyword(key)))

    def _argument(self, key: str) -> Steps[None]:
        """A value of another type than the schema's becomes one of it if it can."""
        types = self._types(key)
        is_text = (yield from self._peek()) in _IN_STRING
        self._begin_argument(key)
        if is_text is ("string" in types) or types > STRING:
            yield from self._literal(self._arguments, 0)
        else:
            yield from self._converted(types, is_text=is_text)

    def _converted(self, types: Types, *, is_text: bool) -> Steps[None]:
        pieces: list[str] = []
        try:
            yield from self._literal(pieces.append, 0)
        except Malformed:
            self._arguments("".join(pieces))
            raise
        written = "".join(pieces)
        self._arguments(written_json(json.loads(written) if is_text else written, types))

    def _word(self) -> Steps[str]:
        """A name or a number: the text up to what cannot be part of one."""
        pieces: list[str] = []
        while True:
            found = _WORD_END(self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), pieces.append)
            if found is not None or not (yield from self._more()):
                return "".join(pieces)

    # Literals, written as JSON

    def _literal(self, write: Write, depth: int) -> Steps[None]:
        first = yield from self._peek()
        if depth > MAX_DEPTH:
            raise Malformed
        if first in _IN_STRING:
            yield from self._strings(write)
        elif first == "[":
            yield from self._list(write, depth)
        elif first == "(":
            yield from self._group(write, depth)
        elif first == "{":
            yield from self._mapping(write, depth)
        else:
            word = yield from self._word()
            write(_json_of(word))

    def _list(self, write: Write, depth: int) -> Steps[None]:
        self._read(1)
        write("[")
        is_last = (yield from self._skip_spaces()) == "]" and (yield from self._skip("]"))
        while not is_last:
            yield from self._literal(write, depth + 1)
            is_last = yield from self._next_of("]")
            if not is_last:
                write(", ")
        write("]")

    def _group(self, write: Write, depth: int) -> Steps[None]:
        """A tuple, which becomes a list, or a value in parentheses."""
        self._read(1)
        values: list[str] = []
        is_tuple = is_last = (yield from self._skip_spaces()) == ")" and (yield from self._skip(")"))
        while not is_last:
            pieces: list[str] = []
            yield from self._literal(pieces.append, depth + 1)
            values.append("".join(pieces))
            is_tuple |= (yield from self._skip_spaces()) == ","
            is_last = yield from self._next_of(")")
        write(f"[{', '.join(values)}]" if is_tuple else values[0])

    def _mapping(self, write: Write, depth: int) -> Steps[None]:
        self._read(1)
        write("{")
        is_last = (yield from self._skip_spaces()) == "}" and (yield from self._skip("}"))
        while not is_last:
            yield from self._mapping_key(write)
            yield from self._skip_spaces()
            yield from self._expect(":")
            yield from self._skip_spaces()
            write(": ")
            yield from self._literal(write, depth + 1)
            is_last = yield from self._next_of("}")
            if not is_last:
                write(", ")
        write("}")

    def _mapping_key(self, write: Write) -> Steps[None]:
        if (yield from self._peek()) in _IN_STRING:
            yield from self._strings(write)
            return
        word = _json_of((yield from self._word()))
        if not _INTEGER(word):
            raise Malformed
        write(quoted(word))

    def _strings(self, write: Write) -> Steps[None]:
        """Adjacent strings are one."""
        write('"')
        while (quote := (yield from self._peek())) in _IN_STRING:
            yield from self._string(quote, write)
            yield from self._skip_spaces()
        write('"')

    def _string(self, quote: str, write: Write) -> Steps[None]:
        def write_text(text: str) -> None:
            write(quoted(text)[1:-1])

        self._read(1)
        is_long = yield from self._skip(quote * 2)
        end = quote * 3 if is_long else quote
        while True:
            found = _IN_STRING[quote](self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), write_text)
            if found is None:
                if not (yield from self._more()):
                    raise Malformed
            elif found[0] == "\\":
                yield from self._escape(write)
            elif found[0] == quote and (yield from self._skip(end)):
                return
            elif not is_long or found[0] == "\0":
                raise Malformed
            else:
                self._pass(self._at + 1, write_text)

    def _escape(self, write: Write) -> Steps[None]:
        code = yield from self._ahead(2)
        kind = code[1]
        if kind == "u":
            yield from self._unicode_escape(write)
        elif kind in _OCTAL:
            yield from self._octal_escape(write)
        elif kind in "N\0":  # a character's name, or what no source has
            raise Malformed
        else:
            char = _ESCAPES.get(kind, code)
            if kind in _HEX_DIGITS:
                code = yield from self._ahead(2 + _HEX_DIGITS[kind])
                char = _char_of(code[2:])
            self._read(len(code))
            write(quoted(char)[1:-1])

    def _octal_escape(self, write: Write) -> Steps[None]:
        self._read(1)
        digits = ""
        while len(digits) < 3 and (digit := (yield from self._peek())) and digit in _OCTAL:
            digits += digit
            self._read(1)
        write(quoted(chr(int(digits, 8)))[1:-1])


def _char_of(digits: str) -> str:
    if not all(digit in string.hexdigits for digit in digits) or int(digits, 16) > MAX_CODE_POINT:
        raise Malformed
    return chr(int(digits, 16))


def _json_of(word: str) -> str:
    """A number or constant as JSON. Raises Malformed if it is none."""
    if word in _WORDS:
        return _WORDS[word]
    if IS_NUMBER(word):
        return in_range(word)
    try:
        value = ast.literal_eval(word) if _NUMBER(word) else None
        if isinstance(value, int | float) and math.isfinite(float(value)):
            return json.dumps(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, OverflowError):
        pass
    raise Malformed
