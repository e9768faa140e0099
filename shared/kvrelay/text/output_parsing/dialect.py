"""How a model writes reasoning and tool calls, found by name or by the chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan
from kvrelay.text.output_parsing import harmony
from kvrelay.text.output_parsing.call_grammar import Format, MarkedCallGrammar, MarkerOf, Thinking
from kvrelay.text.output_parsing.events import (
    CallsOrTextParser,
    OutputParser,
    PlainParser,
    Tool,
)
from kvrelay.text.output_parsing.formats import (
    JSON_ARGUMENTS,
    JSON_LIST,
    OTHER_NAMES,
    REASONING_FORMATS,
    SUFFIX,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    load_tool_format,
)
from kvrelay.text.output_parsing.harmony import HarmonyCallGrammar
from kvrelay.text.output_parsing.reasoning import (
    HarmonyCounter,
    JoinedThinkingParser,
    ReasoningCounter,
    ThinkingParser,
    TokenCounter,
)
from kvrelay.text.output_parsing.response_template import (
    BadResponseTemplate,
    ResponseTemplate,
    ResponseTemplateParser,
    load_response_template,
)

AUTO, NONE, HARMONY, TEMPLATE = "auto", "none", "harmony", "template"

logger = logging.getLogger(__name__)

TokenIdOf = Callable[[str], int | None]
"""Returns the id of the token with this text, or None."""
Encode = Callable[[str], list[int]]
"""Returns the tokens of a text."""


class UnknownParser(ValueError):
    """No parser has this name."""


CallGrammar = MarkedCallGrammar | HarmonyCallGrammar


class Dialect:
    """The formats of one model. The base has neither reasoning nor calls."""

    markers: tuple[str, ...] = ()
    """Special tokens that parsers must see, though clients do not."""
    calls_tools = False
    """Calls are found in its outputs."""
    is_plain = False
    """Without tools, all text is content."""
    has_channels = False
    """Reasoning and answers are harmony's messages in channels: a grammar has them too."""
    reads_prompt = False
    """Parsers must see the end of the prompt."""

    @property
    def with_joined_reasoning(self) -> Dialect | None:
        """The same formats with reasoning and its markers as content. None if reasoning is a message of its own."""
        return None

    def for_required_calls(self, *, is_named: bool) -> Dialect:
        """The same formats, for outputs that must be calls. If no grammar can make the model call tools its own way,
        they are a JSON list of objects with `name` and `parameters`, or the parameters alone if the request names the
        tool."""
        return self

    @property
    def beside_format(self) -> Dialect:
        """The same formats, for outputs that are calls or a text, and not both."""
        return self

    def is_opened_by(self, prompt: str) -> bool:
        """Returns whether the end of this prompt opens the reasoning."""
        return False

    def is_closed_by(self, prompt: str) -> bool:
        """Returns whether the end of this prompt is that of reasoning, so that the output has none."""
        return False

    def is_open_in(self, message: str) -> bool:
        """Returns whether a message that is continued ends within its reasoning."""
        return False

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
        """The parser for an output. `tools`: those that may be called."""
        raise NotImplementedError

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        """Counts the tokens of an output's reasoning. None if it is not between single tokens."""
        return None

    def reasoning_before(
        self, token_id_of: TokenIdOf, encode: Encode, *, begins_inside: bool, token_budget: int | None
    ) -> ReasoningSpan | ReasoningChannels | None:
        """What a worker must know of the reasoning before an answer. None if it is not between single tokens, or if it
        is in channels and has no budget."""
        return None

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        """None if no grammar can make this model call tools. `follows_reasoning`: the grammar begins behind the
        reasoning, if there is any."""
        return None

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        """The format of an output whose answer has this content. None if that is the same, or stands behind the
        reasoning."""
        return None


class MarkedDialect(Dialect):
    """Reasoning between two markers, and calls behind it. Without a tool format the model cannot call tools; without a
    reasoning format all text is content or calls."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        joins_reasoning: bool = False,
    ) -> None:
        self.tools, self.reasoning = tools, reasoning
        self._joins_reasoning = joins_reasoning
        self.calls_tools, self.is_plain = tools is not None, reasoning is None
        around = () if reasoning is None else (reasoning.begin, reasoning.end)
        self.markers = (*around, *(() if tools is None else tools.markers))

    @property
    def with_joined_reasoning(self) -> Dialect:
        return MarkedDialect(self.tools, self.reasoning, joins_reasoning=True)

    def for_required_calls(self, *, is_named: bool) -> Dialect:
        if self.tools is not None and self.tools.syntax is not None:
            return self
        return self._with_tools(JSON_ARGUMENTS if is_named else JSON_LIST)

    @property
    def beside_format(self) -> Dialect:
        tools = self.tools
        if tools is None or (syntax := tools.syntax) is None:
            return self

        def new_parser(called: Sequence[Tool]) -> OutputParser:
            return CallsOrTextParser(tools.new_parser(called), syntax.openings(called))

        return self._with_tools(msgspec.structs.replace(tools, new_parser=new_parser))

    def _with_tools(self, tools: ToolFormat) -> MarkedDialect:
        return MarkedDialect(tools, self.reasoning, joins_reasoning=self._joins_reasoning)

    def is_closed_by(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.end)

    def is_opened_by(self, prompt: str) -> bool:
        if self.reasoning is not None and self.reasoning.is_implied:
            return not self.is_closed_by(prompt)
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin)

    def is_open_in(self, message: str) -> bool:
        return self.reasoning is not None and message.rfind(self.reasoning.begin) > message.rfind(self.reasoning.end)

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
        inner: OutputParser = PlainParser()
        if tools and self.tools is not None:
            if self.tools.syntax is None:  # no grammar makes the model write calls that are well-formed
                tools = [msgspec.structs.replace(tool, is_strict=False) for tool in tools]
            inner = self.tools.new_parser(tools)
        if self.reasoning is None:
            return inner
        new_parser = JoinedThinkingParser if self._joins_reasoning else ThinkingParser
        return new_parser(inner, begin=self.reasoning.begin, end=self.reasoning.end, begins_inside=begins_inside)

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        ids = self._marker_ids(token_id_of)
        return ReasoningCounter(ids[0], ids[1], begins_inside=begins_inside) if ids is not None else None

    def reasoning_before(
        self, token_id_of: TokenIdOf, encode: Encode, *, begins_inside: bool, token_budget: int | None
    ) -> ReasoningSpan | None:
        ids = self._marker_ids(token_id_of)
        if ids is None:
            return None
        begin_id, end_id = ids
        return ReasoningSpan(begin_id=begin_id, end_id=end_id, is_open=begins_inside, token_budget=token_budget)

    def _marker_ids(self, token_id_of: TokenIdOf) -> tuple[int, int] | None:
        """The tokens around the reasoning. None if there are none."""
        if self.reasoning is None:
            return None
        begin_id, end_id = token_id_of(self.reasoning.begin), token_id_of(self.reasoning.end)
        return None if begin_id is None or end_id is None else (begin_id, end_id)

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


class HarmonyDialect(Dialect):
    """Reasoning and calls are messages in channels: one parser reads both. No single token ends the reasoning: the next
    channel may be reasoning again. If a message is continued, the chat template writes the channels."""

    markers = harmony.MARKERS
    calls_tools = True
    has_channels = True

    def is_opened_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(harmony.CHANNEL + harmony.ANALYSIS + harmony.MESSAGE)

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
        return harmony.HarmonyParser(tools, begins_inside=begins_inside)

    def new_counter(self, token_id_of: TokenIdOf, *, begins_inside: bool) -> TokenCounter | None:
        ids = [token_id_of(each) for each in (harmony.CHANNEL, harmony.ANALYSIS, harmony.START)]
        if None in ids:
            return None
        channel, analysis, start = (each or 0 for each in ids)
        return HarmonyCounter(channel, analysis, start, begins_inside=begins_inside)

    def reasoning_before(
        self, token_id_of: TokenIdOf, encode: Encode, *, begins_inside: bool, token_budget: int | None
    ) -> ReasoningChannels | None:
        names = harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.END, harmony.ANALYSIS, harmony.FINAL
        ids = [token_id for name in names if (token_id := token_id_of(name)) is not None]
        if token_budget is None or len(ids) < len(names):
            return None
        channel_id, message_id, start_id, end_id, reasoning_id, answer_id = ids
        return ReasoningChannels(
            channel_id=channel_id,
            message_id=message_id,
            start_id=start_id,
            reasoning_id=reasoning_id,
            answer_id=answer_id,
            other_ids=tuple(encode(harmony.COMMENTARY)[:1]),
            closing_ids=(end_id, start_id, *encode(harmony.ASSISTANT), channel_id),
            is_open=begins_inside,
            token_budget=token_budget,
        )

    def call_grammar(
        self, marker_of: MarkerOf, *, begins_inside: bool, follows_reasoning: bool = False
    ) -> CallGrammar | None:
        return HarmonyCallGrammar(marker_of=marker_of, begins_inside=begins_inside)

    def answer_format(self, content: Format, marker_of: MarkerOf, *, begins_inside: bool) -> Format | None:
        return HarmonyCallGrammar(marker_of=marker_of, begins_inside=begins_inside).answer(content)


class TemplateDialect(Dialect):
    """What the tokenizer's `response_template` says. Its calls have no grammar, and its reasoning has no budget."""

    reads_prompt = True

    def __init__(self, template: ResponseTemplate, markers: tuple[str, ...]) -> None:
        self.template, self.markers = template, markers
        self.calls_tools = template.calls is not None

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool, prompt_end: str = "") -> OutputParser:
        return ResponseTemplateParser(self.template, tools, prompt_end)


Named = TypeVar("Named", ToolFormat, ReasoningFormat)


def find_dialect(
    tool_parser: str,
    reasoning_parser: str,
    template: str | None,
    response_template: Any = None,
    special_tokens: Sequence[str] = (),
) -> Dialect:
    """The formats with these names, which may be vLLM's or SGLang's; `auto`: those that the chat template shows; a name
    that ends in `.py`: that of the file; `template`: as `response_template` says, which `auto` also takes if no calls
    are known. Raises UnknownParser or BadFormatFile.
    """
    tool_parser, reasoning_parser = own_parser_names(tool_parser, reasoning_parser)
    names = {tool_parser, reasoning_parser}
    if TEMPLATE in names:
        _check_both(TEMPLATE, names)
        try:
            return _of_template(response_template, special_tokens)
        except BadResponseTemplate as error:
            raise UnknownParser(f"the tokenizer's response_template cannot be used: {error}") from error
    if HARMONY in names or (names == {AUTO} and _shows_harmony(template or "")):
        _check_both(HARMONY, names)
        return HarmonyDialect()
    if tool_parser.endswith(SUFFIX):
        tools: ToolFormat | None = load_tool_format(tool_parser)
    else:
        tools = _find(tool_parser, TOOL_FORMATS, template)
    if tools is None and response_template is not None and names == {AUTO}:
        try:
            return _of_template(response_template, special_tokens)
        except BadResponseTemplate as error:
            logger.warning("the tokenizer's response_template is not used: %s", error)
    return MarkedDialect(tools, _find(reasoning_parser, REASONING_FORMATS, template))


def _check_both(name: str, names: set[str]) -> None:
    if not names <= {name, AUTO}:
        raise UnknownParser(f"{name!r} reads both calls and reasoning: set both parsers to it, or one to {AUTO!r}")


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


def own_parser_names(tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """The names here of both parsers, which may be given by vLLM's or SGLang's names. Raises UnknownParser."""
    return _own_name(tool_parser, 0, TOOL_FORMATS), _own_name(reasoning_parser, 1, REASONING_FORMATS)


def _own_name(name: str, column: int, formats: Sequence[ToolFormat] | Sequence[ReasoningFormat]) -> str:
    own = [AUTO, NONE, *(each.name for each in formats), HARMONY, TEMPLATE]
    if name in own or (column == 0 and name.endswith(SUFFIX)):
        return name
    found = OTHER_NAMES.get(name.lower().replace("-", "_"), (None, None))[column]
    if found is None:
        others = ", ".join(other for other, meant in OTHER_NAMES.items() if meant[column] and other not in own)
        kind = ("tool", "reasoning")[column]
        raise UnknownParser(
            f"{name!r} is no {kind} parser; known are {', '.join(own)}, and as in vLLM and SGLang: {others}"
        )
    return found


def _find(name: str, formats: Sequence[Named], template: str | None) -> Named | None:
    if name == AUTO:
        return next((each for each in formats if _shows(template or "", each)), None)
    return next((each for each in formats if each.name == name), None)


def _shows_harmony(template: str) -> bool:
    return harmony.CHANNEL in template and harmony.MESSAGE in template


def _shows(template: str, format_: ToolFormat | ReasoningFormat) -> bool:
    if any(sign in template for sign in format_.foreign_signs):
        return False
    return any(all(sign in template for sign in row) for row in format_.signs)
