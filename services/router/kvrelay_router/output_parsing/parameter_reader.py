"""Reads calls whose arguments are written one by one, each with its name, and writes them as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvrelay_router.output_parsing.argument_values import ANY_TYPE, STRING, Types, quoted, types_of, written_json
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, TextParser, Write, new_call_id
from kvrelay_router.output_parsing.tool import Tool

MAX_GAP_CHARS = 256
"""Whitespace behind the end of a value. With more, the end belongs to the value."""
MAX_MARKER_CHARS = 32

IS_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}").fullmatch


class ParameterReader(TextParser):
    """The schemas of `tools` tell which values are texts; others are JSON, or literals of Python."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId = new_call_id) -> None:
        super().__init__(new_id)
        self._tools = {tool.name: tool for tool in tools}
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
        self._drop_head()

    def _give_up(self) -> None:
        if self._call_is_open and not self._is_over:
            self._arguments("}" if self._num_arguments else "{}")  # there is more text, but none for this call
        super()._give_up()

    def _types(self, key: str) -> Types:
        parameters = {} if self._called is None else self._called.parameters
        properties = parameters.get("properties")
        if not isinstance(properties, dict) or key not in properties:
            return ANY_TYPE
        return types_of(properties[key], parameters)

    def _begin_argument(self, key: str) -> None:
        self._arguments(f"{', ' if self._num_arguments else '{'}{quoted(key)}: ")
        self._num_arguments += 1
        self._drop_head()

    def _argument_text(
        self, key: str, ends: Markers, following: Mapping[str, Sequence[str]], *, in_lines: bool
    ) -> Steps[str]:
        """Reads a value and the marker behind it, which it returns. A marker belongs to the value unless one of
        `following` comes next, or the end of the output. `in_lines`: a line break on each side is none of the value's.
        Raises Malformed at the end of the output."""
        types = self._types(key)
        self._begin_argument(key)
        pieces = _StringPieces(self._arguments) if types == STRING else _Pieces()
        if in_lines:
            first = yield from self._peek()
            if first == "\n":
                self._at += 1
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
