"""The base of the parsers that `formats.py` chooses from: one module beside this for each family of formats.

They are generators that read the output as if it were complete, and are suspended where text is missing.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from kvrelay.text.output_parsing.events import (
    ArgumentsDelta,
    ContentText,
    Event,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
Write = Callable[[str], None]

MAX_HEAD_CHARS = 1 << 16
"""Text that is withheld until it is known to be a call. Longer text is content."""


IS_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}").fullmatch
"""Matches the name of a function, in formats that do not know the tools."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Malformed(Exception):
    """The text that was read is not what the parser expected."""


class Markers:
    """Strings to search for. None may be a part of another."""

    def __init__(self, *markers: str) -> None:
        self.texts = markers
        self.find = re.compile("|".join(map(re.escape, markers))).search
        self._beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
        self._starts = re.compile(f"[{re.escape(''.join({marker[0] for marker in markers}))}]").finditer
        self._longest = max(map(len, markers))

    def held_from(self, text: str, start: int) -> int:
        """Where, at or behind `start`, the end of the text begins that may be the beginning of a marker."""
        for found in self._starts(text, max(start, len(text) - self._longest + 1)):
            if text[found.start() :] in self._beginnings:
                return found.start()
        return len(text)


class TextParser(ABC):
    """An `OutputParser`. `_parse` reads with the methods below; text that it does not read is content."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._events: list[Event] = []
        self._spaces: list[str] = []  # whitespace behind the content, which is no content in front of a call
        self._num_calls = 0
        self._ids: set[str] = set()  # ids of the calls so far
        self._call_is_open = False
        self._head: list[str] = []  # text of a call that is read and not yet in an event
        self._head_chars = 0
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Event]:
        self._is_over = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Reads the output."""

    def _run(self) -> Steps[None]:
        try:
            yield from self._parse()
        except Malformed:
            self._give_up()
        while True:
            self._content(self._take_rest())
            if not (yield from self._more()):
                break
        if not self._num_calls:
            self._flush_spaces()

    # Reading

    def _more(self) -> Steps[bool]:
        """Waits for text. False at the end of the output."""
        if self._is_over:
            return False
        yield
        return not self._is_over

    def _take_rest(self) -> str:
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def _pass(self, end: int, write: Write) -> None:
        """Reads up to `end`, and passes it to `write`."""
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            write(text)

    def _until(self, markers: Markers, write: Write) -> Steps[str | None]:
        """Passes the text before the next marker to `write`, and reads the marker. None at the end of the output."""
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                self._pass(found.start(), write)
                self._at += len(found[0])
                return found[0]
            self._pass(markers.held_from(self._text, self._at), write)
            if not (yield from self._more()):
                self._pass(len(self._text), write)
                return None

    def _peek(self) -> Steps[str]:
        """The next character, or an empty string at the end of the output."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _starts_with(self, expected: str) -> Steps[bool]:
        """Whether the text goes on so. Reads nothing."""
        while True:
            there = self._text[self._at : self._at + len(expected)]
            if there == expected:
                return True
            if not expected.startswith(there) or not (yield from self._more()):
                return False

    def _skip(self, expected: str) -> Steps[bool]:
        """Reads this text if it is next."""
        is_next = yield from self._starts_with(expected)
        if is_next:
            self._read_head(len(expected))
        return is_next

    def _expect(self, expected: str) -> Steps[None]:
        if not (yield from self._skip(expected)):
            if self._is_over and expected.startswith(self._text[self._at :]):
                self._read_head(len(self._text) - self._at)  # only its end is missing
            raise Malformed

    def _skip_spaces(self) -> Steps[str]:
        """Reads whitespace. Returns the character behind it, unread."""
        while (char := (yield from self._peek())) and char.isspace():
            self._read_head(1)
        return char

    def _short_text(self, ends: Markers) -> Steps[tuple[str, str]]:
        """Reads a short text and the marker behind it. Raises Malformed if there is none."""
        num_before = len(self._head)
        marker = yield from self._until(ends, self._keep)
        if marker is None:
            raise Malformed
        text = "".join(self._head[num_before:])
        self._keep(marker)
        return text, marker

    def _read_head(self, num_chars: int) -> None:
        self._pass(self._at + num_chars, self._keep)

    def _keep(self, text: str) -> None:
        """Keeps text that was just read, for the case that it turns out to be malformed."""
        self._head.append(text)
        self._head_chars += len(text)
        if self._head_chars > MAX_HEAD_CHARS:
            # The place of the cut must not depend on the pieces in which the text came.
            num_unread = self._head_chars - MAX_HEAD_CHARS
            self._head[-1] = text[: len(text) - num_unread]
            self._at -= num_unread
            raise Malformed

    # Writing

    def _new_id(self) -> str:
        return new_call_id()

    def _content(self, text: str) -> None:
        if kept := self._without_end(text):
            self._events.append(ContentText(kept))

    def _without_end(self, text: str) -> str:
        """The text with the whitespace that was withheld before it. Its own last whitespace is withheld."""
        kept = text.rstrip()
        spaces = text[len(kept) :]
        if kept:
            kept = self._take_spaces() + kept
        if spaces:
            self._spaces.append(spaces)  # joined later: an output may go on with whitespace for long
        return kept

    def _take_spaces(self) -> str:
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _flush_spaces(self) -> None:
        if self._spaces:
            self._events.append(ContentText(self._take_spaces()))

    def _begin_head(self, text: str) -> None:
        """A call may begin with this text."""
        self._head, self._head_chars = [text], len(text)

    def _drop_head(self) -> None:
        """Forgets the text read so far, which became an event or is syntax."""
        self._head, self._head_chars = [], 0

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._spaces = []
        self._drop_head()
        self._call_is_open = True
        if not call_id or call_id in self._ids:  # clients tell calls apart by their ids
            call_id = self._new_id()
        self._ids.add(call_id)
        self._events.append(ToolCallBegun(self._num_calls, call_id, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))

    def _end_call(self) -> None:
        """Ends the open call, if there is one. The text read since its arguments belongs to the call."""
        if self._call_is_open:
            self._call_is_open = False
            self._events.append(ToolCallEnded(self._num_calls - 1))
        self._drop_head()

    def _give_up(self) -> None:
        """Handles malformed text: the open call ends with its arguments, and the rest is content. If only the end of
        the output is missing, an open call has no rest."""
        is_cut = self._call_is_open and self._is_over and self._at == len(self._text)
        rest = "" if is_cut else "".join(self._head)
        self._end_call()
        self._content(rest)


class CallParser(TextParser):
    """Content with calls behind `_opens`. With `_first`, calls may also begin the output, with this character."""

    _opens: Markers
    _first = ""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}

    @abstractmethod
    def _call(self, opened: str) -> Steps[None]:
        """Reads what is behind the marker, which is empty at the beginning of the output. Raises Malformed."""

    def _parse(self) -> Steps[None]:
        if self._first:
            self._begin_head("")
            if (yield from self._skip_spaces()) == self._first:
                yield from self._guarded_call("")
            else:
                self._give_up()
        while (opened := (yield from self._until(self._opens, self._content))) is not None:
            self._begin_head(opened)
            yield from self._guarded_call(opened)

    def _guarded_call(self, opened: str) -> Steps[None]:
        try:
            yield from self._call(opened)
        except Malformed:
            self._give_up()
        else:
            self._end_call()
