"""The parts of a model's output, the tools that it may call, and the interface of the parsers that find calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters`: a JSON schema of an object. `is_strict`: calls must follow it."""

    name: str
    parameters: dict[str, Any] = {}
    is_strict: bool = False


class ReasoningText(msgspec.Struct, frozen=True):
    text: str


class ContentText(msgspec.Struct, frozen=True):
    text: str


class ToolCallBegun(msgspec.Struct, frozen=True):
    """`index` counts the calls of an output from 0."""

    index: int
    call_id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """The next part of a call's arguments, which are JSON text."""

    index: int
    text: str


class ToolCallEnded(msgspec.Struct, frozen=True):
    index: int


Event = ReasoningText | ContentText | ToolCallBegun | ArgumentsDelta | ToolCallEnded


class OutputParser(Protocol):
    """Parses one output while it grows. How the text is cut into pieces does not change the joined events.

    No parser fails: text that is no reasoning and no well-formed call is content. After `ToolCallBegun`, calls get
    their arguments as the model writes them, even if these are no valid JSON, and always end with `ToolCallEnded`.
    """

    def feed(self, text: str) -> list[Event]:
        """Returns the events that the text up to here decides."""
        ...

    def finish(self) -> list[Event]:
        """Returns the events of the text that was withheld. Call it once, at the end."""
        ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[Event]:
        return []


MAX_OPENING_CHARS = 1024
"""After so many characters an output that could still begin with a call is a text."""


class CallsOrTextParser:
    """An output beside a format: all of it is for the parser of `calls` if it begins with one of `openings`, with any
    whitespace, else all of it is content, whatever it quotes."""

    def __init__(self, calls: OutputParser, openings: Sequence[str]) -> None:
        self._calls, self._openings = calls, tuple(map(_without_spaces, openings))
        self._chosen: OutputParser | None = None
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        if self._chosen is None:
            self._held += text
            begun = _without_spaces(self._held[:MAX_OPENING_CHARS])
            if begun.startswith(self._openings):
                self._chosen = self._calls
            elif len(self._held) < MAX_OPENING_CHARS and any(each.startswith(begun) for each in self._openings):
                return []
            else:
                self._chosen = PlainParser()
            text, self._held = self._held, ""
        return self._chosen.feed(text)

    def finish(self) -> list[Event]:
        chosen = self._chosen or PlainParser()
        return [*chosen.feed(self._held), *chosen.finish()]


def _without_spaces(text: str) -> str:
    return "".join(text.split())
