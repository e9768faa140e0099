"""How a model writes reasoning and tool calls, found by name or by the chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from kvrelay_router.output_parsing import format_file, harmony
from kvrelay_router.output_parsing.call_grammar import CallGrammar, MarkedCallGrammar, Thinking
from kvrelay_router.output_parsing.events import OutputParser, PlainParser
from kvrelay_router.output_parsing.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from kvrelay_router.output_parsing.grammar_formats import Format, MarkerOf
from kvrelay_router.output_parsing.reasoning_counter import HarmonyCounter, ReasoningCounter, TokenCounter
from kvrelay_router.output_parsing.response_template import (
    BadResponseTemplate,
    ResponseTemplate,
    ResponseTemplateParser,
    load_response_template,
)
from kvrelay_router.output_parsing.thinking import ThinkingParser
from kvrelay_router.output_parsing.tool import Tool

AUTO, NONE, HARMONY, TEMPLATE = "auto", "none", "harmony", "template"

logger = logging.getLogger(__name__)

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

    @property
    def has_channels(self) -> bool:
        """Whether reasoning and answers are harmony's messages in channels."""
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

    @property
    def reads_prompt(self) -> bool:
        """Whether parsers must see the end of the prompt."""
        ...

    @property
    def without_reasoning(self) -> Dialect | None:
        """The same formats with reasoning and its markers as content. None if reasoning is a message of its own."""
        ...

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
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

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        """The format of an output whose answer has this content. None if that is the same, or stands behind the
        reasoning that `reasoning_markers` end."""
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

    @property
    def has_channels(self) -> bool:
        return False

    @property
    def reads_prompt(self) -> bool:
        return False

    @property
    def without_reasoning(self) -> Dialect:
        return msgspec.structs.replace(self, reasoning=None)

    def is_closed_by(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.end)

    def is_opened_by(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin)

    def is_open_in(self, message: str) -> bool:
        return self.reasoning is not None and message.rfind(self.reasoning.begin) > message.rfind(self.reasoning.end)

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
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

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        return None


class HarmonyDialect(msgspec.Struct, frozen=True):
    """Reasoning and calls are messages in channels: one parser reads both."""

    markers: tuple[str, ...] = harmony.MARKERS
    calls_tools: bool = True
    is_plain: bool = False
    has_channels: bool = True
    reads_prompt: bool = False
    without_reasoning: None = None

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        return None  # no single token ends it: the next channel may be reasoning again

    def is_closed_by(self, prompt: str) -> bool:
        return False

    def is_opened_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(harmony.CHANNEL + harmony.ANALYSIS + harmony.MESSAGE)

    def is_open_in(self, message: str) -> bool:
        return False  # the chat template writes the channels

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
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

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        return harmony.HarmonyCallGrammar(marker_of=marker_of, begins_inside=begins_inside).answer(content)


class TemplateDialect(msgspec.Struct, frozen=True):
    """What the tokenizer's `response_template` says. Its calls have no grammar, and its reasoning has no budget."""

    template: ResponseTemplate
    markers: tuple[str, ...]
    is_plain: bool = False
    has_channels: bool = False
    reads_prompt: bool = True
    without_reasoning: None = None

    @property
    def calls_tools(self) -> bool:
        return self.template.calls is not None

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        return None

    def is_closed_by(self, prompt: str) -> bool:
        return False

    def is_opened_by(self, prompt: str) -> bool:
        return False

    def is_open_in(self, message: str) -> bool:
        return False

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
        return ResponseTemplateParser(self.template, tools, prompt_end)

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        return None

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        return None

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        return None


Named = TypeVar("Named", ToolFormat, ReasoningFormat)


def find_dialect(
    tool_parser: str,
    reasoning_parser: str,
    template: str | None,
    response_template: Any = None,
    special_tokens: Sequence[str] = (),
) -> Dialect:
    """The formats with these names; `auto`: those that the chat template shows; a name that ends in `.py`: that of the
    file; `template`: as `response_template` says, which `auto` also takes if no calls are known. Raises UnknownParser
    or BadFormatFile.
    """
    names = {tool_parser, reasoning_parser}
    if TEMPLATE in names:
        if not names <= {TEMPLATE, AUTO}:
            raise UnknownParser(
                f"{TEMPLATE!r} reads both calls and reasoning: set both parsers to it, or one to {AUTO!r}"
            )
        try:
            return _of_template(response_template, special_tokens)
        except BadResponseTemplate as error:
            raise UnknownParser(f"the tokenizer's response_template cannot be used: {error}") from error
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
    if tools is None and response_template is not None and names == {AUTO}:
        try:
            return _of_template(response_template, special_tokens)
        except BadResponseTemplate as error:
            logger.warning("the tokenizer's response_template is not used: %s", error)
    return MarkedDialect(tools, _find(reasoning_parser, REASONING_FORMATS, template))


def _of_template(spec: Any, special_tokens: Sequence[str]) -> TemplateDialect:
    """Parsers see the special tokens that the template names."""
    if spec is None:
        raise BadResponseTemplate("there is none")
    template = load_response_template(spec)
    texts = "\n".join(_texts_in(spec))
    named = texts + texts.replace("\\", "")  # patterns escape some characters
    return TemplateDialect(template, tuple(token for token in special_tokens if token in named))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)


def _find(name: str, formats: Sequence[Named], template: str | None) -> Named | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in formats if _shows(template or "", each)), None)
    for each in formats:
        if each.name == name:
            return each
    known = ", ".join([AUTO, NONE, *(each.name for each in formats), HARMONY, TEMPLATE])
    raise UnknownParser(f"{name!r} is no parser; known are {known}")


def _shows_harmony(template: str) -> bool:
    return harmony.CHANNEL in template and harmony.MESSAGE in template


def _shows(template: str, format_: ToolFormat | ReasoningFormat) -> bool:
    if any(sign in template for sign in format_.foreign_signs):
        return False
    return any(all(sign in template for sign in row) for row in format_.signs)
