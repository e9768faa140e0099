"""How a model writes reasoning and tool calls, found by name or by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from kvrelay_router.output_parsing import format_file, harmony
from kvrelay_router.output_parsing.call_grammar import CallGrammar, MarkedCallGrammar, Thinking
from kvrelay_router.output_parsing.events import OutputParser, PlainParser
from kvrelay_router.output_parsing.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from kvrelay_router.output_parsing.grammar_formats import MarkerOf
from kvrelay_router.output_parsing.reasoning_counter import HarmonyCounter, ReasoningCounter, TokenCounter
from kvrelay_router.output_parsing.thinking import ThinkingParser
from kvrelay_router.output_parsing.tool import Tool

AUTO, NONE, HARMONY = "auto", "none", "harmony"

TokenIdOf = Callable[[str], int | None]
"""Returns the id of the token with this text, or None."""


class UnknownParser(ValueError):
    """No parser has this name."""


class Dialect(Protocol):
    """The formats of one model.

    `markers`: special tokens that parsers must see, though clients do not. `calls_tools`: calls are found in its
    outputs. `is_plain`: without tools, all text is content.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def calls_tools(self) -> bool: ...

    @property
    def is_plain(self) -> bool: ...

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """What begins and ends the reasoning. None if there is none before the content."""
        ...

    def is_opened_by(self, prompt: str) -> bool:
        """Returns whether the end of this prompt opens the reasoning."""
        ...

    def is_closed_by(self, prompt: str) -> bool:
        """Returns whether the end of this prompt is that of reasoning, so that the output has none."""
        ...

    def is_open_in(self, message: str) -> bool:
        """Returns whether a message that is continued ends within its reasoning."""
        ...

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool) -> OutputParser:
        """The parser for an output. `tools`: those that may be called."""
        ...

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        """Counts the tokens of an output's reasoning. None if it is not between single tokens."""
        ...

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        """None if no grammar can make this model call tools. `follows_reasoning`: the grammar begins behind the
        reasoning, if there is any."""
        ...


class MarkedDialect(msgspec.Struct, frozen=True):
    """Reasoning between two markers, and calls behind it. Without a tool format the model cannot call tools; without a
    reasoning format all text is content or calls."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (*(self.reasoning_markers or ()), *(() if self.tools is None else self.tools.markers))

    @property
    def calls_tools(self) -> bool:
        return self.tools is not None

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        return None if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)

    def is_closed_by(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.end)

    def is_opened_by(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin)

    def is_open_in(self, message: str) -> bool:
        return self.reasoning is not None and message.rfind(self.reasoning.begin) > message.rfind(self.reasoning.end)

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool) -> OutputParser:
        inner: OutputParser = PlainParser()
        if tools and self.tools is not None:
            inner = self.tools.new_parser(tools)
        if self.reasoning is None:
            return inner
        return ThinkingParser(inner, begin=self.reasoning.begin, end=self.reasoning.end, begins_inside=begins_inside)

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        if self.reasoning is None:
            return None
        begin_id, end_id = map(token_id_of, (self.reasoning.begin, self.reasoning.end))
        if begin_id is None or end_id is None:
            return None
        return ReasoningCounter(begin_id, end_id, begins_inside=begins_inside)

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        if self.tools is None or self.tools.syntax is None:
            return None
        thinking, reasoning = None, self.reasoning
        if reasoning is not None and not follows_reasoning:
            thinking = Thinking(reasoning.begin, reasoning.end, begins_inside)
        return MarkedCallGrammar(
            syntax=self.tools.syntax, thinking=thinking, marker_of=marker_of, follows_reasoning=follows_reasoning
        )


class HarmonyDialect(msgspec.Struct, frozen=True):
    """Reasoning and calls are messages in channels: one parser reads both."""

    markers: tuple[str, ...] = harmony.MARKERS
    calls_tools: bool = True
    is_plain: bool = False

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        return None  # no single token ends it: the next channel may be reasoning again

    def is_closed_by(self, prompt: str) -> bool:
        return False

    def is_opened_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(harmony.CHANNEL + harmony.ANALYSIS + harmony.MESSAGE)

    def is_open_in(self, message: str) -> bool:
        return False  # the chat template writes the channels

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool) -> OutputParser:
        return harmony.HarmonyParser(tools, begins_inside=begins_inside)

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        ids = [token_id_of(each) for each in (harmony.CHANNEL, harmony.ANALYSIS, harmony.START)]
        if None in ids:
            return None
        channel, analysis, start = (each or 0 for each in ids)
        return HarmonyCounter(channel, analysis, start, begins_inside=begins_inside)

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        return harmony.HarmonyCallGrammar(marker_of=marker_of, begins_inside=begins_inside)


Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def find_dialect(tool_parser: str, reasoning_parser: str, template: str | None) -> Dialect:
    """The formats with these names; `auto`: those that the chat template shows; a name that ends in `.py`: that of the
    file. Raises UnknownParser or BadFormatFile.
    """
    names = {tool_parser, reasoning_parser}
    if HARMONY in names or (names == {AUTO} and _shows_harmony(template or "")):
        if not names <= {HARMONY, AUTO}:
            raise UnknownParser(
                f"{HARMONY!r} reads both calls and reasoning: set both parsers to it, or one to {AUTO!r}"
            )
        return HarmonyDialect()
    if tool_parser.endswith(format_file.SUFFIX):
        tools: ToolFormat | None = format_file.load_tool_format(tool_parser)
    else:
        tools = _find(tool_parser, TOOL_FORMATS, template)
    return MarkedDialect(tools, _find(reasoning_parser, REASONING_FORMATS, template))


def _find(name: str, formats: Sequence[Format], template: str | None) -> Format | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in formats if _shows(template or "", each)), None)
    for each in formats:
        if each.name == name:
            return each
    known = ", ".join([AUTO, NONE, *(each.name for each in formats), HARMONY])
    raise UnknownParser(f"{name!r} is no parser; known are {known}")


def _shows_harmony(template: str) -> bool:
    return harmony.CHANNEL in template and harmony.MESSAGE in template


def _shows(template: str, format_: ToolFormat | ReasoningFormat) -> bool:
    if any(sign in template for sign in format_.foreign_signs):
        return False
    return any(all(sign in template for sign in row) for row in format_.signs)
