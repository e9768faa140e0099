"""gpt-oss (OpenAI's harmony): an output is a row of messages, each with a channel: reasoning in `analysis`, calls with
a recipient in `commentary`, the answer in `final`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvrelay.text.output_parsing.call_grammar import (
    ANY_TEXT,
    NOTHING,
    Format,
    MarkerOf,
    either,
    json_arguments,
    marked,
    sequence,
    tag,
    text,
)
from kvrelay.text.output_parsing.events import ReasoningText, Tool
from kvrelay.text.output_parsing.json_calls import JsonReader
from kvrelay.text.output_parsing.parser_base import Malformed, Markers, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ASSISTANT = "assistant"
BETWEEN_MESSAGES = "\n"

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)").search
_RECIPIENT = re.compile(r"\bto=([^\s<]+)").search
_IS_CUT_HEADER = re.compile(
    r"(<\|start\|>\w*)?[^<>|]*(<\|channel\|>[^<>|]*)?(<\|constrain\|>\w*)?(<\|?\w*\|?)?"
).fullmatch
FUNCTIONS = "functions."


class HarmonyParser(JsonReader):
    """`begins_inside`: the prompt has opened a message of reasoning. Without `tools` no message is a call."""

    _ends = Markers(END, CALL, RETURN, START, CHANNEL)
    _header_ends = Markers(MESSAGE, END, CALL, RETURN)

    def __init__(self, tools: Sequence[Tool], *, begins_inside: bool = False) -> None:
        super().__init__(tools)
        self._begins_inside = begins_inside
        self._has_reasoning = self._has_content = False

    def _parse(self) -> Steps[None]:
        self._begin_head()
        header: str | None = None
        if self._begins_inside:
            header = CHANNEL + ANALYSIS
        else:
            yield from self._skip_spaces()
            opened = yield from self._header_start()
            if opened:
                header = yield from self._header()
        while header is not None:
            marker = yield from self._message(header)
            if marker is None:
                return
            header = yield from self._next_header(marker)

    def _header_start(self) -> Steps[bool]:
        for beginning in (CHANNEL, START, "to="):
            if (yield from self._starts_with(beginning)):
                return True
        self._give_up()
        return False

    def _next_header(self, marker: str) -> Steps[str | None]:
        """The header of the next message, whose first marker may have ended the last one."""
        if marker in (START, CHANNEL):
            self._begin_head(len(marker))
            return (yield from self._header())
        yield from self._skip_spaces()
        self._begin_head()
        if (yield from self._starts_with(START)) or (yield from self._starts_with(CHANNEL)):
            return (yield from self._header())
        return ""  # text without a header: content

    def _header(self) -> Steps[str | None]:
        """The text up to the message. None if the output ends in it. Raises Malformed if there is no message."""
        try:
            _, end = yield from self._short_text(self._header_ends)
        except Malformed:
            if not self._is_over or not _IS_CUT_HEADER(self._head_text()):
                raise
            self._drop_head()
            return None
        if end != MESSAGE:
            raise Malformed
        return self._head_text()

    def _message(self, header: str) -> Steps[str | None]:
        """Reads a message and the marker behind it, which it returns. None at the end of the output."""
        channel, recipient = _CHANNEL(header), _RECIPIENT(header)
        name = "" if recipient is None else recipient[1]
        if self._tools and name.startswith(FUNCTIONS) and len(name) > len(FUNCTIONS):
            return (yield from self._call_message(name.removeprefix(FUNCTIONS)))
        self._drop_head()
        if channel is not None and channel[1] == ANALYSIS:
            if self._has_reasoning and header:
                self._reasoning(BETWEEN_MESSAGES)
            self._has_reasoning = True
            marker = yield from self._until(self._ends, self._reasoning)
            if marker is None and self._spaces:
                self._events.append(ReasoningText(self._take_spaces()))
        else:
            if self._has_content and header:
                self._content(BETWEEN_MESSAGES)
            self._has_content = True
            marker = yield from self._until(self._ends, self._content)
        if marker is not None:
            self._spaces = []
        return marker

    def _call_message(self, name: str) -> Steps[str | None]:
        """A message that is no object is content, with its header."""
        try:
            self._begin_call(name)
            if not (yield from self._skip_spaces()) or (yield from self._is_ended()):
                self._arguments("{}")
            else:
                yield from self._object()
            if (yield from self._skip_spaces()) and not (yield from self._is_ended()):
                raise Malformed
        except Malformed:
            self._give_up()
        else:
            self._commit()
            self._drop_head()
        return (yield from self._until(self._ends, self._content))

    def _is_ended(self) -> Steps[bool]:
        for marker in self._ends.texts:
            if (yield from self._starts_with(marker)):
                return True
        return False

    def _reasoning(self, text: str) -> None:
        if kept := self._without_end(text):
            self._events.append(ReasoningText(kept))


class HarmonyCallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """As `MarkedCallGrammar`. Calls are never parallel: each ends its output. A grammar is of the whole output, with
    the reasoning and the headers of its messages."""

    marker_of: MarkerOf
    begins_inside: bool

    def required(self, tools: Sequence[Tool], *, is_parallel: bool) -> Format:
        return sequence(self._reasoning(), self._call(tools, all_strict=True))

    def allowed(self, tools: Sequence[Tool]) -> Format:
        preamble = either([self._closed(COMMENTARY), NOTHING])
        final = either([self._final(ANY_TEXT), self._call(tools, all_strict=False)])
        return sequence(self._reasoning(), preamble, final)

    def or_text(self, content: Format, tools: Sequence[Tool], *, is_parallel: bool) -> Format:
        return sequence(self._reasoning(), either([self._final(content), self._call(tools, all_strict=False)]))

    def answer(self, content: Format) -> Format:
        """The output is an answer with this content, and no call."""
        return sequence(self._reasoning(), self._final(content))

    def _final(self, content: Format) -> Format:
        header = marked(self.marker_of(CHANNEL)), text(FINAL), marked(self.marker_of(MESSAGE))
        return sequence(*header, content)

    def _reasoning(self) -> Format:
        if self.begins_inside:
            return sequence(tag("", ANY_TEXT, self.marker_of(END)), *self._next())
        return either([self._closed(ANALYSIS), NOTHING])

    def _call(self, tools: Sequence[Tool], *, all_strict: bool) -> Format:
        return either([self._call_of(tool, all_strict or tool.is_strict) for tool in tools])

    def _call_of(self, tool: Tool, is_strict: bool) -> Format:
        recipient = text(f"{COMMENTARY} to={FUNCTIONS}{tool.name} ")
        constraint = marked(self.marker_of(CONSTRAIN)), text("json"), marked(self.marker_of(MESSAGE))
        arguments = json_arguments(tool, is_strict=is_strict)
        return sequence(marked(self.marker_of(CHANNEL)), recipient, *constraint, arguments)

    def _closed(self, channel: str) -> Format:
        """A message with another one behind it."""
        header = marked(self.marker_of(CHANNEL)), text(channel)
        return sequence(*header, tag(self.marker_of(MESSAGE), ANY_TEXT, self.marker_of(END)), *self._next())

    def _next(self) -> tuple[Format, ...]:
        return marked(self.marker_of(START)), text(ASSISTANT)
