"""Reads calls whose arguments are JSON, while they are written."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence

from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.output_parsing.parser_base import IS_NAME, CallParser, Malformed, Markers, Steps, Write

ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]').search
_SCALAR_END = re.compile(r"[\s,}\]<]").search


class JsonReader(CallParser):
    """Calls are objects, `{"name": ..., "arguments": {...}}`. `_stop` is the text behind a call, which is none of
    JSON's: it ends a value that is malformed."""

    _stop = ""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._structure = re.compile(rf'["{{}}\[\]{re.escape(self._stop[:1])}]').search

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        yield from self._json_call()
        yield from self._skip_spaces()
        yield from self._expect(self._stop)

    def _json_call(self) -> Steps[None]:
        """Reads one object. Raises Malformed, and then `_give_up` writes what was read."""
        await_name: list[str] = []  # arguments that came before the name
        has_arguments = False
        yield from self._expect("{")
        is_first = True
        while (yield from self._skip_spaces()) != "}":
            if not is_first:
                yield from self._expect(",")
                yield from self._skip_spaces()
            is_first = False
            key = yield from self._string()
            yield from self._skip_spaces()
            yield from self._expect(":")
            first = yield from self._skip_spaces()
            if key == "name" and not self._call_is_open:
                self._begin_call((yield from self._name()))
                self._arguments("".join(await_name))
            elif key in ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                yield from self._argument_value(first, await_name)
            else:
                yield from self._value(self._keep)
        self._read_head(1)
        if not self._call_is_open:
            raise Malformed
        if not has_arguments:
            self._arguments("{}")

    def _argument_value(self, first: str, await_name: list[str]) -> Steps[None]:
        def write(text: str) -> None:
            if self._call_is_open:
                self._arguments(text)
            else:
                self._keep(text)
                await_name.append(text)

        if self._call_is_open:
            self._head = []
        if first == '"':  # JSON text in a string, as clients get it
            text = yield from self._string()
            if self._call_is_open:
                self._arguments(text)
            else:
                await_name.append(text)
        elif (yield from self._skip("null")):
            self._arguments("{}") if self._call_is_open else await_name.append("{}")
        else:
            yield from self._value(write)

    def _name(self) -> Steps[str]:
        name = yield from self._string()
        if not name:
            raise Malformed
        return name

    def _string(self) -> Steps[str]:
        """Reads a string, and returns its value."""
        if (yield from self._peek()) != '"':
            raise Malformed
        pieces: list[str] = []

        def write(text: str) -> None:
            self._keep(text)
            pieces.append(text)

        yield from self._quoted(write)
        try:
            value = str(json.loads("".join(pieces), strict=False))
        except ValueError:
            raise Malformed from None
        return value.encode(errors="replace").decode()  # lone surrogates cannot be written

    def _value(self, write: Write) -> Steps[None]:
        """Passes a value's text to `write`. Raises Malformed if it ends too early."""
        first = yield from self._peek()
        if first == '"':
            yield from self._quoted(write)
        elif first and first in "{[":
            yield from self._nested(write)
        elif not first or first in ",}]":
            raise Malformed
        else:
            yield from self._scalar(write)

    def _nested(self, write: Write) -> Steps[None]:
        depth = 0
        while True:
            found = self._structure(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            self._pass(end, write)
            if found is None:
                if not (yield from self._more()):
                    raise Malformed
            elif found[0] == '"':
                yield from self._quoted(write)
            elif found[0] == self._stop[:1] and (yield from self._starts_with(self._stop)):
                raise Malformed
            elif found[0] in "{}[]":
                depth += 1 if found[0] in "{[" else -1
                self._pass(self._at + 1, write)
                if depth <= 0:
                    return
            else:
                self._pass(self._at + 1, write)

    def _quoted(self, write: Write) -> Steps[None]:
        """A string, quotes included."""
        self._pass(self._at + 1, write)
        while True:
            found = _IN_STRING(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            self._pass(end, write)
            if found is not None and found[0] == '"':
                self._pass(end + 1, write)
                return
            if found is not None and len(self._text) > end + 1:
                self._pass(end + 2, write)
            elif not (yield from self._more()):
                self._pass(len(self._text), write)
                raise Malformed

    def _scalar(self, write: Write) -> Steps[None]:
        while True:
            found = _SCALAR_END(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            self._pass(end, write)
            if found is not None:
                return
            if not (yield from self._more()):
                raise Malformed


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
    _stop = tag

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_spaces()
        while True:
            yield from self._json_call()
            self._end_call()
            following = yield from self._skip_spaces()
            if following == ";":
                yield from self._expect(";")
                yield from self._skip_spaces()
            elif following != "{":
                self._give_up()
                return

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
    _stop = tag
    _name_ends = Markers(call_id, arguments, "{", tag)
    _id_ends = Markers(arguments, "{", tag)

    def _new_id(self) -> str:
        """The chat templates of these models allow no other ids than nine letters and digits."""
        return "".join([secrets.choice(_SHORT_ID) for _ in range(9)])

    def _call(self, opened: str) -> Steps[None]:
        first = yield from self._skip_spaces()
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._json_call()
        else:
            yield from self._named_call()

    def _list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._skip_spaces()
            yield from self._json_call()
            self._end_call()
            yield from self._skip_spaces()
            if (yield from self._skip("]")):
                return
            yield from self._expect(",")

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
        self._drop_head()
        yield from self._value(self._arguments)

    def _upto(self, ends: Markers) -> Steps[tuple[str, str]]:
        """Reads a short text and the marker behind it. A marker that belongs to what follows is not consumed."""
        text, end = yield from self._short_text(ends)
        if end in ("{", self.tag):
            self._at -= len(end)
            self._head.pop()
            self._head_chars -= len(end)
        if end == self.tag:
            raise Malformed
        return text.strip(), end


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
            yield from self._expect(call_begin)
        while True:
            behind = yield from self._call_head()
            yield from self._value(self._arguments)
            for expected in (behind, call_end):
                yield from self._skip_spaces()
                yield from self._expect(expected)
            self._end_call()
            yield from self._skip_spaces()
            if (yield from self._skip(end)):
                return
            yield from self._expect(call_begin)


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
            name, end = yield from self._short_text(self._lines)
            yield from self._skip_spaces()
            if end != "\n" or not (yield from self._skip(self.block)):
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
        self._drop_head()
        return ""
