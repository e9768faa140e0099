"""Llama 3.2 and 4 with pythonic calls: the output is a Python list of calls, as in `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Sequence

from kvrelay import excerpts
from kvrelay.text.output_parsing.argument_values import STRING, Types, quoted, written_json
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
from kvrelay.text.output_parsing.parser_base import Malformed, Markers, Steps, Write

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64
MAX_CODE_POINT = 0x10FFFF
MAX_NUMBER = 1e308

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*").fullmatch
_WORD_END = re.compile(r"[\s,)\]}:=('\"\[{]").search
_IN_STRING = {quote: re.compile(rf"[{quote}\\\\]").search for quote in "\"'"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?").fullmatch
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = dict(zip("ntrbfav0\n\\'\"/", ("\n", "\t", "\r", "\b", "\f", "\a", "\v", "\0", "", *"\\'\"/"), strict=True))
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")"}


def _call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    """Writes required arguments first, so that a comma precedes each optional one."""
    parameters = parameters_of(tool)
    for parameter in parameters:
        if not _NAME(parameter.name):
            raise Unconstrainable(f"{excerpts.quoted(parameter.name)} is no name of an argument in Python")
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
    """Lists of other things than calls of the tools are content."""

    _opens = Markers(START)
    _first = "["

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        yield from self._expect("[")
        while True:
            yield from self._skip_spaces()
            yield from self._function_call()
            self._end_call()
            if (yield from self._skip_spaces()) == "]":
                break
            yield from self._expect(",")
        yield from self._expect("]")
        self._drop_head()
        yield from self._skip_spaces()
        if (yield from self._skip(END)):
            self._drop_head()
        self._give_up()

    def _function_call(self) -> Steps[None]:
        name = yield from self._word()
        if name not in self._tools:
            raise Malformed
        yield from self._expect("(")
        self._begin_parameters(name)
        while (yield from self._skip_spaces()) != ")":
            key = yield from self._word()
            yield from self._skip_spaces()
            if not _NAME(key):
                raise Malformed
            yield from self._expect("=")
            yield from self._skip_spaces()
            yield from self._argument(key)
            if (yield from self._skip_spaces()) != ")":
                yield from self._expect(",")
        self._read_head(1)
        self._end_parameters()

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

        def write(text: str) -> None:
            self._keep(text)
            pieces.append(text)

        while True:
            found = _WORD_END(self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), write)
            if found is not None or not (yield from self._more()):
                return "".join(pieces)

    # Literals, written as JSON

    def _literal(self, write: Write, depth: int) -> Steps[None]:
        first = yield from self._peek()
        if depth > MAX_DEPTH:
            raise Malformed
        if first in _IN_STRING:
            yield from self._string(first, write)
        elif first in _CLOSING:
            yield from self._sequence(_CLOSING[first], write, depth)
        elif first == "{":
            yield from self._mapping(write, depth)
        else:
            word = yield from self._word()
            write(_json_of(word))
        self._drop_head()

    def _sequence(self, closing: str, write: Write, depth: int) -> Steps[None]:
        self._at += 1
        write("[")
        is_first = True
        while (yield from self._skip_spaces()) != closing:
            if not is_first:
                write(", ")
            is_first = False
            yield from self._literal(write, depth + 1)
            if (yield from self._skip_spaces()) != closing:
                yield from self._expect(",")
        self._at += 1
        write("]")

    def _mapping(self, write: Write, depth: int) -> Steps[None]:
        self._at += 1
        write("{")
        is_first = True
        while (yield from self._skip_spaces()) != "}":
            if not is_first:
                write(", ")
            is_first = False
            first = yield from self._peek()
            if first in _IN_STRING:
                yield from self._string(first, write)
            else:
                write(quoted(_json_of((yield from self._word()))))
            yield from self._skip_spaces()
            yield from self._expect(":")
            yield from self._skip_spaces()
            write(": ")
            yield from self._literal(write, depth + 1)
            if (yield from self._skip_spaces()) != "}":
                yield from self._expect(",")
        self._at += 1
        write("}")

    def _string(self, quote: str, write: Write) -> Steps[None]:
        def write_text(text: str) -> None:
            write(quoted(text)[1:-1])

        self._at += 1
        write('"')
        end = quote
        if (yield from self._starts_with(quote * 2)):
            self._at += 2
            end = quote * 3
        while True:
            found = _IN_STRING[quote](self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), write_text)
            if found is None:
                if not (yield from self._more()):
                    raise Malformed
            elif found[0] != quote:
                yield from self._escape(write)
            elif (yield from self._starts_with(end)):
                self._at += len(end)
                write('"')
                return
            else:
                self._pass(self._at + 1, write_text)

    def _escape(self, write: Write) -> Steps[None]:
        """The next characters begin with a backslash."""
        code = yield from self._ahead(2)
        num_digits = _HEX_ESCAPES.get(code[1], 0)
        if num_digits:
            code = yield from self._ahead(2 + num_digits)
        self._at += len(code)
        if code[1] == "u" and _is_hex(code[2:]):
            write(code)  # unchanged: in JSON too, two escapes may be one character
        elif num_digits and _is_hex(code[2:]) and int(code[2:], 16) <= MAX_CODE_POINT:
            write(quoted(chr(int(code[2:], 16)))[1:-1])
        else:
            write(quoted(_ESCAPES.get(code[1], code) if not num_digits else code)[1:-1])

    def _ahead(self, num_chars: int) -> Steps[str]:
        """The next characters, unread. Raises Malformed at the end of the output."""
        while len(self._text) < self._at + num_chars:
            if not (yield from self._more()):
                self._read_head(num_chars)
                raise Malformed
        return self._text[self._at : self._at + num_chars]


def _is_hex(text: str) -> bool:
    return all(char in string.hexdigits for char in text)


def _json_of(word: str) -> str:
    """A number or constant as JSON. Raises Malformed if it is none."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER(word):
        return word
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise Malformed from None
    if isinstance(value, int | float) and value == value and abs(value) < MAX_NUMBER:
        return json.dumps(value)
    raise Malformed
