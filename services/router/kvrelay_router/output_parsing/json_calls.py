"""Reads calls that are JSON objects, `{"name": ..., "arguments": {...}}`, while they are written."""

from __future__ import annotations

import json
import re

from kvrelay_router.output_parsing.text_parser import Malformed, NewId, Steps, TextParser, Write, new_call_id

ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]').search
_SCALAR_END = re.compile(r"[\s,}\]<]").search


class JsonReader(TextParser):
    """`stop` ends a value that is malformed: the text behind a call, which is none of JSON's."""

    def __init__(self, stop: str = "", new_id: NewId = new_call_id) -> None:
        super().__init__(new_id)
        self._stop = stop
        self._structure = re.compile(rf'["{{}}\[\]{re.escape(stop[:1])}]').search

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
