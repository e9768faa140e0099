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
MAX_HELD_CHARS = 4096
"""Of a call that is withheld until it is complete. A longer one is passed on as it comes."""

SPACES = " \t\n\r"
"""Whitespace of JSON."""

IS_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}").fullmatch
"""Matches the name of a function, in formats that do not know the tools."""
IS_ESCAPE = re.compile(r"\\u[0-9A-Fa-f]{4}").fullmatch
IS_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F][0-9A-Fa-f]{2}").fullmatch


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Malformed(Exception):
    """The text that was read is not what the parser expected."""


class NoCall(Malformed):
    """What opens a call stands in a text, and calls may follow."""


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
    """An `OutputParser`. `_parse` reads with the methods below; text that it does not read is content.

    While a call is read, its text is kept as the head, and its events are held. A malformed call is content, unless it
    was passed on before its end, because it is long or a grammar makes the model write it: then its arguments stay
    incomplete, as do those of a call that the end of the output cuts.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._events: list[Event] = []
        self._spaces: list[str] = []  # whitespace behind the content, which is no content in front of a call
        self._num_calls = 0
        self._ids: set[str] = set()  # ids of the calls so far
        self._call_is_open = False
        self._head_at: int | None = None  # where the head goes on in `_text`; None if there is none
        self._head: list[str] = []  # what the head has from earlier texts
        self._head_chars = 0  # of these
        self._num_written = 0  # characters of the head whose arguments are events
        self._held: list[Event] = []
        self._is_passed_on = False
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._head_at is not None:
            self._head.append(self._text[self._head_at : self._at])
            self._head_chars += self._at - self._head_at
            self._head_at = 0
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Event]:
        self._is_over = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        if self._held and self._may_pass_on():
            self._pass_on()
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

    def _read(self, num_chars: int) -> None:
        self._at += num_chars
        if self._head_at is None or self._held or self._is_passed_on:
            return
        # The place of the cut must not depend on the pieces in which the text came.
        if (excess := self._num_head_chars - MAX_HEAD_CHARS) > 0:
            self._at -= excess
            raise Malformed

    def _pass(self, end: int, write: Write) -> None:
        """Reads up to `end`, and passes it to `write`."""
        if end > self._at:
            start = self._at
            self._read(end - start)
            write(self._text[start:end])

    def _until(self, markers: Markers, write: Write) -> Steps[str | None]:
        """Passes the text before the next marker to `write`, and reads the marker. None at the end of the output."""
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                self._pass(found.start(), write)
                self._read(len(found[0]))
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

    def _ahead(self, num_chars: int) -> Steps[str]:
        """The next characters, unread. Raises Malformed at the end of the output."""
        while len(self._text) < self._at + num_chars:
            if not (yield from self._more()):
                self._at = len(self._text)
                raise Malformed
        return self._text[self._at : self._at + num_chars]

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
            self._read(len(expected))
        return is_next

    def _expect(self, expected: str) -> Steps[None]:
        if not (yield from self._skip(expected)):
            if self._is_over and expected.startswith(self._text[self._at :]):
                self._at = len(self._text)  # only its end is missing
            raise Malformed

    def _skip_spaces(self) -> Steps[str]:
        """Reads whitespace. Returns the character behind it, unread."""
        while (char := (yield from self._peek())) and char in SPACES:
            self._read(1)
        return char

    def _short_text(self, ends: Markers) -> Steps[tuple[str, str]]:
        """Reads a short text and the marker behind it. Raises Malformed if there is none."""
        pieces: list[str] = []
        marker = yield from self._until(ends, pieces.append)
        if marker is None:
            raise Malformed
        return "".join(pieces), marker

    def _unicode_escape(self, write: Write) -> Steps[None]:
        r"""Reads an escape of the form \u0000, or two that are one character. Half of one cannot be written."""
        code = yield from self._ahead(6)
        if not IS_ESCAPE(code):
            raise Malformed
        is_half = code[2] in "dD" and code[3] not in "01234567"
        both = ""
        if is_half and code[3] in "89abAB" and (yield from self._starts_with(code + "\\u")):
            both = yield from self._ahead(12)
        if IS_SECOND_HALF(both[6:]):
            self._pass(self._at + 12, write)
        elif is_half:
            self._read(6)
            write("?")
        else:
            self._pass(self._at + 6, write)

    # Content

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

    # Calls

    def _begin_head(self, num_chars: int = 0) -> None:
        """A call may begin with the last characters that were read."""
        self._drop_head()
        self._head_at = self._at - num_chars

    def _drop_head(self) -> None:
        self._head_at, self._head, self._head_chars, self._num_written = None, [], 0, 0

    @property
    def _num_head_chars(self) -> int:
        return self._head_chars + (0 if self._head_at is None else self._at - self._head_at)

    def _head_text(self) -> str:
        return "".join([*self._head, *([] if self._head_at is None else [self._text[self._head_at : self._at]])])

    def _new_id(self) -> str:
        return new_call_id()

    def _is_constrained(self, name: str) -> bool:
        """A grammar makes the model write the calls of this function."""
        return False

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        if not call_id or call_id in self._ids:  # clients tell calls apart by their ids
            call_id = self._new_id()
        self._ids.add(call_id)
        self._held.append(ToolCallBegun(self._num_calls, call_id, name))
        self._num_calls += 1
        self._call_is_open = True
        self._is_passed_on |= self._is_constrained(name)

    def _arguments(self, text: str) -> None:
        if text:
            self._held.append(ArgumentsDelta(self._num_calls - 1, text))
            self._num_written = self._num_head_chars

    def _end_call(self) -> None:
        """Ends the open call, if there is one. It is held: it may be well-formed only together with the next ones."""
        if self._call_is_open:
            self._call_is_open = False
            self._held.append(ToolCallEnded(self._num_calls - 1))

    def _commit(self) -> None:
        """The calls that were read are complete. Another one may follow."""
        self._end_call()
        if self._held:
            self._spaces = []
        self._events += _joined(self._held)
        self._held, self._is_passed_on = [], False
        self._begin_head()

    def _may_pass_on(self) -> bool:
        return self._is_passed_on or self._num_head_chars > MAX_HELD_CHARS

    def _pass_on(self) -> None:
        """Passes on what is held but for the last character of the arguments: they must not look complete."""
        self._is_passed_on = True
        self._spaces = []
        held, self._held = _joined(self._held), []
        if isinstance(last := held[-1], ArgumentsDelta):
            self._held = [ArgumentsDelta(last.index, last.text[-1])]
            held[-1:] = [ArgumentsDelta(last.index, last.text[:-1])] if len(last.text) > 1 else []
        self._events += held
        if self._num_written == self._num_head_chars:
            self._begin_head()
        elif self._num_written:
            rest = self._head_text()[self._num_written :]
            self._begin_head()
            self._head, self._head_chars = [rest], len(rest)

    def _is_cut(self) -> bool:
        """Only the end of the output is missing."""
        return self._is_over and self._at == len(self._text)

    def _give_up(self) -> None:
        """Handles malformed text: it is content. If only the end of the output is missing, calls are cut there."""
        if (self._held or self._is_passed_on) and self._is_cut():
            self._commit()
        elif (self._held or self._is_passed_on) and self._may_pass_on():
            if self._held:
                self._pass_on()
            self._held = []
            rest = self._head_text()[self._num_written :]
            self._commit()
            self._content(rest)
        else:
            begun = [event for event in self._held if isinstance(event, ToolCallBegun)]
            self._num_calls -= len(begun)
            self._ids -= {event.call_id for event in begun}
            self._held, self._call_is_open = [], False
            self._content(self._head_text())
        self._drop_head()


def _joined(events: Sequence[Event]) -> list[Event]:
    """The events with adjacent parts of arguments joined."""
    joined: list[Event] = []
    parts: list[str] = []
    for event in events:
        if isinstance(event, ArgumentsDelta):
            parts.append(event.text)
            index = event.index
            continue
        if parts:
            joined.append(ArgumentsDelta(index, "".join(parts)))
            parts = []
        joined.append(event)
    return [*joined, ArgumentsDelta(index, "".join(parts))] if parts else joined


class CallParser(TextParser):
    """Content with calls behind `_opens`. With `_first`, calls may also begin the output, with this character. `_stop`:
    the text behind a call, where one that is malformed ends; without it the end of the output."""

    _opens: Markers
    _first = ""
    _stop = ""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}

    @abstractmethod
    def _call(self, opened: str) -> Steps[None]:
        """Reads what is behind the marker, which is empty at the beginning of the output. Raises Malformed."""

    def _is_constrained(self, name: str) -> bool:
        return name in self._tools and self._tools[name].is_strict

    def _parse(self) -> Steps[None]:
        if self._first:
            self._begin_head()
            if (yield from self._skip_spaces()) == self._first:
                yield from self._guarded_call("")
            else:
                self._give_up()
        while (opened := (yield from self._until(self._opens, self._content))) is not None:
            self._begin_head(len(opened))
            yield from self._guarded_call(opened)

    def _guarded_call(self, opened: str) -> Steps[None]:
        """Calls that a malformed call quotes are no calls."""
        try:
            yield from self._call(opened)
        except NoCall:
            self._give_up()
        except Malformed:
            is_ended = bool(self._stop) and self._head_text().endswith(self._stop)
            self._give_up()
            if not is_ended:
                yield from self._rest_of_call()
        else:
            self._commit()
            self._drop_head()

    def _rest_of_call(self) -> Steps[None]:
        if self._stop:
            self._content((yield from self._until(Markers(self._stop), self._content)) or "")
            return
        while True:
            self._content(self._take_rest())
            if not (yield from self._more()):
                return
