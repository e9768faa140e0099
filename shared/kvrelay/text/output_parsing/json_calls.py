"""Reads calls whose arguments are JSON, while they are written."""

from __future__ import annotations

import json
import re
import secrets
import string

from kvrelay.text.output_parsing.argument_values import IS_NUMBER, MAX_NESTING, in_range, is_json_object
from kvrelay.text.output_parsing.parser_base import (
    IS_NAME,
    SPACES,
    CallParser,
    Malformed,
    Markers,
    NoCall,
    Steps,
    Write,
)

NAME, ARGUMENTS = "name", "arguments"
_KEYS = {"parameters": ARGUMENTS}
"""Other names of keys."""
_IN_STRING = re.compile(r'["\\\x00-\x1f]').search
_SCALAR_END = re.compile(r"[^-+.0-9A-Za-z]").search
_CLOSING = {"{": "}", "[": "]"}


class JsonReader(CallParser):
    """Calls are objects, `{"name": ..., "arguments": {...}}`. Arguments are passed on as they are written."""

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        yield from self._json_call()
        yield from self._skip_spaces()
        yield from self._expect(self._stop)

    def _json_call(self) -> Steps[None]:
        """Reads one object. Raises Malformed."""
        await_name: list[str] = []  # arguments that came before the name
        seen: set[str] = set()
        if not (yield from self._skip("{")):
            raise NoCall
        while (yield from self._skip_spaces()) != "}":
            if seen:
                yield from self._expect(",")
                yield from self._skip_spaces()
            key = yield from self._string()
            key = _KEYS.get(key, key)
            yield from self._skip_spaces()
            yield from self._expect(":")
            first = yield from self._skip_spaces()
            if key in seen:
                raise Malformed
            seen.add(key)
            if key == NAME:
                self._begin_call((yield from self._name()))
                self._arguments("".join(await_name))
            elif key == ARGUMENTS:
                yield from self._argument_value(first, self._arguments if NAME in seen else await_name.append)
            else:
                yield from self._value(_ignore)
        self._read(1)
        if NAME not in seen:
            raise Malformed
        if ARGUMENTS not in seen:
            self._arguments("{}")

    def _json_list(self) -> Steps[None]:
        """Reads a list of such objects."""
        yield from self._expect("[")
        while True:
            yield from self._skip_spaces()
            yield from self._json_call()
            self._end_call()
            yield from self._skip_spaces()
            if (yield from self._skip("]")):
                return
            yield from self._expect(",")

    def _object(self) -> Steps[None]:
        """Reads the arguments of the open call."""
        if (yield from self._peek()) != "{":
            raise Malformed
        yield from self._value(self._arguments)

    def _argument_value(self, first: str, write: Write) -> Steps[None]:
        if first == "{":
            yield from self._value(write)
        elif first == '"':  # JSON text in a string, as clients get it
            text = (yield from self._string()) or "{}"
            if not is_json_object(text):
                raise Malformed
            write(text)
        else:
            yield from self._expect("null")
            write("{}")

    def _name(self) -> Steps[str]:
        name = yield from self._string()
        if not name:
            raise Malformed
        return name

    def _string(self) -> Steps[str]:
        """Reads a string, and returns its value."""
        pieces: list[str] = []
        yield from self._quoted(pieces.append)
        return str(json.loads("".join(pieces)))

    def _value(self, write: Write) -> Steps[None]:
        """Passes a value's text to `write`. Raises Malformed."""
        closing: list[str] = []
        while True:
            first = yield from self._peek()
            if first == '"':
                yield from self._quoted(write)
            elif first in _CLOSING:
                closing.append(_CLOSING[first])
                if len(closing) > MAX_NESTING:
                    raise Malformed
                self._pass(self._at + 1, write)
                if (yield from self._gap(write)) != closing[-1]:
                    yield from self._key(closing[-1], write)
                    continue
            else:
                yield from self._scalar(write)
            while closing and (yield from self._gap(write)) == closing[-1]:
                closing.pop()
                self._pass(self._at + 1, write)
            if not closing:
                return
            if (yield from self._peek()) != ",":
                raise Malformed
            self._pass(self._at + 1, write)
            yield from self._gap(write)
            yield from self._key(closing[-1], write)

    def _gap(self, write: Write) -> Steps[str]:
        """Passes on whitespace. Returns the character behind it, unread."""
        while (char := (yield from self._peek())) and char in SPACES:
            self._pass(self._at + 1, write)
        return char

    def _key(self, closing: str, write: Write) -> Steps[None]:
        """Passes on what stands in front of a value in an object, or nothing in a list."""
        if closing == "]":
            return
        yield from self._quoted(write)
        if (yield from self._gap(write)) != ":":
            raise Malformed
        self._pass(self._at + 1, write)
        yield from self._gap(write)

    def _quoted(self, write: Write) -> Steps[None]:
        """A string, quotes included."""
        if (yield from self._peek()) != '"':
            raise Malformed
        self._pass(self._at + 1, write)
        while True:
            found = _IN_STRING(self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), write)
            if found is None:
                if not (yield from self._more()):
                    raise Malformed
            elif found[0] == '"':
                self._pass(self._at + 1, write)
                return
            elif found[0] == "\\":
                yield from self._escape(write)
            else:
                raise Malformed

    def _escape(self, write: Write) -> Steps[None]:
        code = yield from self._ahead(2)
        if code[1] == "u":
            yield from self._unicode_escape(write)
        elif code[1] in '"\\/bfnrt':
            self._pass(self._at + 2, write)
        else:
            raise Malformed

    def _scalar(self, write: Write) -> Steps[None]:
        """A number or constant."""
        pieces: list[str] = []
        while True:
            found = _SCALAR_END(self._text, self._at)
            self._pass(len(self._text) if found is None else found.start(), pieces.append)
            if found is not None:
                break
            if not (yield from self._more()):
                raise Malformed
        word = "".join(pieces)
        if word in ("true", "false", "null"):
            write(word)
        elif IS_NUMBER(word):
            write(in_range(word))
        else:
            raise Malformed


def _ignore(text: str) -> None:
    pass


class HermesParser(JsonReader):
    """Hermes 2 and 3, Qwen 2.5 and Qwen 3: each call is an object in `<tool_call>` tags."""

    open, close = "<tool_call>", "</tool_call>"
    _opens = Markers(open)
    _stop = close


class Llama3JsonParser(JsonReader):
    """Llama 3.1 to 3.3: calls are objects at the beginning of the output or behind `<|python_tag|>`. An object whose
    name is none of the tools' is content: without a tag, JSON may be the answer."""

    tag = "<|python_tag|>"
    _opens = Markers(tag)
    _first = "{"

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        while True:
            yield from self._json_call()
            self._commit()
            following = yield from self._skip_spaces()
            if following == ";":
                self._read(1)
                yield from self._skip_spaces()
            elif following != "{":
                raise NoCall

    def _name(self) -> Steps[str]:
        name = yield from super()._name()
        if name not in self._tools:
            raise Malformed
        return name


_SHORT_ID = string.ascii_letters + string.digits
_IS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch


class MistralParser(JsonReader):
    """Behind `[TOOL_CALLS]` comes a JSON list of calls, or, in newer models, a name and its arguments."""

    tag, call_id, arguments = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    _opens = Markers(tag)
    _name_ends = Markers(call_id, arguments, "{", tag)
    _id_ends = Markers(arguments, "{", tag)

    def _new_id(self) -> str:
        """The chat templates of these models allow no other ids than nine letters and digits."""
        return "".join([secrets.choice(_SHORT_ID) for _ in range(9)])

    def _call(self, opened: str) -> Steps[None]:
        first = yield from self._skip_spaces()
        if first == "[":
            yield from self._json_list()
        elif first == "{":
            yield from self._json_call()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        name, end = yield from self._upto(self._name_ends)
        call_id = None
        if end == self.call_id:
            call_id, end = yield from self._upto(self._id_ends)
            if not _IS_ID(call_id):
                raise Malformed
        if not IS_NAME(name):
            raise Malformed
        self._begin_call(name, call_id)
        yield from self._skip_spaces()
        yield from self._object()

    def _upto(self, ends: Markers) -> Steps[tuple[str, str]]:
        """Reads a short text and the marker behind it. A brace, which belongs to what follows, is not consumed."""
        text, end = yield from self._short_text(ends)
        if end == self.tag:
            raise Malformed
        if end == "{":
            self._at -= 1
        return text.strip(), end


class GraniteParser(JsonReader):
    """Granite 3: a JSON list of calls behind a tag."""

    tag, text_tag = "<|tool_call|>", "<tool_call>"
    _opens = Markers(tag, text_tag)

    def _call(self, opened: str) -> Steps[None]:
        if (yield from self._skip_spaces()) != "[":
            raise NoCall
        yield from self._json_list()


class JsonListParser(JsonReader):
    """A list of calls is all of the output."""

    def _parse(self) -> Steps[None]:
        self._begin_head()
        yield from self._guarded_call("")

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        yield from self._json_list()


class JsonArgumentsParser(JsonListParser):
    """The arguments of a call of the only tool are all of the output."""

    def _call(self, opened: str) -> Steps[None]:
        if (yield from self._skip_spaces()) != "{":
            raise Malformed
        self._begin_call(next(iter(self._tools)))
        yield from self._object()


class SectionReader(JsonReader):
    """Calls stand one after the other in a section, each between two markers: a head that `_call_head` reads, and JSON.
    A call may also stand without a section, and the section may lack its end."""

    section: tuple[str, str, str, str]
    """What begins the section and a call, and ends a call and the section."""

    def _call_head(self) -> Steps[str]:
        """Reads up to the arguments, and begins the call. Returns what must stand behind them. Raises Malformed."""
        raise NotImplementedError

    def _call(self, opened: str) -> Steps[None]:
        begin, call_begin, call_end, end = self.section
        if opened == begin:
            yield from self._skip_spaces()
            if not (yield from self._skip(call_begin)):
                raise NoCall
        while True:
            behind = yield from self._call_head()
            yield from self._object()
            for expected in (behind, call_end):
                yield from self._skip_spaces()
                yield from self._expect(expected)
            self._commit()
            yield from self._skip_spaces()
            if (yield from self._skip(end)):
                return
            if not (yield from self._skip(call_begin)):
                raise NoCall


class DeepSeekParser(SectionReader):
    """V3 and R1: the name in one line, then the arguments in a block of code. V3.1: the name and the arguments."""

    # ruff: noqa: RUF001 - the markers have such characters
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    separator, block, block_end = "<｜tool▁sep｜>", "```json", "```"
    _opens = Markers(*section[:2])
    _stop = section[2]
    _separators = Markers(separator, _stop)
    _lines = Markers("\n", _stop)

    def _call_head(self) -> Steps[str]:
        name, end = yield from self._short_text(self._separators)
        if end != self.separator:
            raise Malformed
        is_block = (yield from self._skip_spaces()) != "{"
        if is_block:
            kind = name.strip()
            name, end = yield from self._short_text(self._lines)
            yield from self._skip_spaces()
            if not IS_NAME(kind) or end != "\n" or not (yield from self._skip(self.block)):
                raise Malformed
            yield from self._skip_spaces()
        if not IS_NAME(name.strip()):
            raise Malformed
        self._begin_call(name.strip())
        return self.block_end if is_block else ""


class KimiK2Parser(SectionReader):
    """The id of a call names its function, as in `functions.NAME:0`. Ids are kept: the chat template shows them to the
    model again. One that the output has already gets the next free number, as clients tell calls apart by their ids."""

    section = (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"
    )  # fmt: skip
    separator = "<|tool_call_argument_begin|>"
    functions = "functions."
    _opens = Markers(*section[:2])
    _stop = section[2]
    _separators = Markers(separator, _stop)
    _id = re.compile(r"(?:functions\.)?([A-Za-z0-9_.-]{1,256}?)(?::\d+)?")

    def _unused(self, call_id: str, name: str) -> str:
        number = self._num_calls
        while call_id in self._ids:
            call_id, number = f"{self.functions}{name}:{number}", number + 1
        return call_id

    def _call_head(self) -> Steps[str]:
        call_id, end = yield from self._short_text(self._separators)
        call_id = call_id.strip()
        found = self._id.fullmatch(call_id)
        if end != self.separator or found is None:
            raise Malformed
        self._begin_call(found[1], self._unused(call_id, found[1]))
        yield from self._skip_spaces()
        return ""
