"""How a model writes reasoning and tool calls: families of formats, found by name or by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvrelay_router.output_parsing.call_grammar import CallGrammar, CallSyntax, Marker, Thinking
from kvrelay_router.output_parsing.events import OutputParser, PlainParser
from kvrelay_router.output_parsing.hermes import SYNTAX, HermesParser
from kvrelay_router.output_parsing.llama3_json import TAG, Llama3JsonParser
from kvrelay_router.output_parsing.thinking import ThinkingParser
from kvrelay_router.output_parsing.tool import Tool

AUTO, NONE = "auto", "none"


class UnknownParser(ValueError):
    """No parser has this name."""


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written. `signs`: texts in the chat templates of these models; all of one row must be there,
    and no `foreign_signs`. `syntax`: how a grammar makes a model write calls; None if no grammar can."""

    name: str
    new_parser: Callable[[Sequence[Tool]], OutputParser]
    markers: tuple[str, ...]  # control tokens that the parser reads, special in some tokenizers
    signs: tuple[tuple[str, ...], ...]
    foreign_signs: tuple[str, ...] = ()
    syntax: CallSyntax | None = None


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning is text between two markers, before the content."""

    name: str
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...]
    foreign_signs: tuple[str, ...] = ()


TOOL_FORMATS = (
    ToolFormat(
        name="hermes",
        new_parser=lambda tools: HermesParser(),
        markers=("<tool_call>", "</tool_call>"),
        signs=(("<tool_call>", '"name"'),),
        foreign_signs=("<function=", "<arg_key>"),  # Qwen3-Coder's and GLM's calls have the same tags around XML
        syntax=SYNTAX,
    ),
    ToolFormat(
        name="llama3_json",
        new_parser=Llama3JsonParser,
        markers=(TAG,),
        signs=(("<|start_header_id|>", '"parameters": '),),
    ),
)

REASONING_FORMATS = (
    ReasoningFormat(name="think", begin="<think>", end="</think>", signs=(("</think>",),)),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", signs=(("[THINK]",),)),
)


class Dialect(msgspec.Struct, frozen=True):
    """The formats of one model. Without a tool format it cannot call tools; without a reasoning format all text is
    content or calls."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that parsers must see, though clients do not."""
        reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return (*reasoning, *(() if self.tools is None else self.tools.markers))

    def begins_inside(self, text: str) -> bool:
        """Whether an output that follows this text begins with reasoning: the prompt's end has opened it."""
        return self.reasoning is not None and text.rfind(self.reasoning.begin) > text.rfind(self.reasoning.end)

    def new_parser(self, tools: Sequence[Tool], *, begins_inside: bool) -> OutputParser:
        """The parser for an output. `tools`: those that may be called."""
        inner: OutputParser = PlainParser()
        if tools and self.tools is not None:
            inner = self.tools.new_parser(tools)
        if self.reasoning is None:
            return inner
        return ThinkingParser(inner, begin=self.reasoning.begin, end=self.reasoning.end, begins_inside=begins_inside)

    def call_grammar(self, marker_of: Callable[[str], Marker], *, begins_inside: bool) -> CallGrammar | None:
        """None if no grammar can make this model call tools."""
        if self.tools is None or self.tools.syntax is None:
            return None
        reasoning = self.reasoning
        thinking = None if reasoning is None else Thinking(reasoning.begin, reasoning.end, begins_inside)
        return CallGrammar(syntax=self.tools.syntax, thinking=thinking, marker_of=marker_of)


Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def find_dialect(tool_parser: str, reasoning_parser: str, template: str | None) -> Dialect:
    """The formats with these names; `auto`: those that the chat template shows. Raises UnknownParser."""
    return Dialect(_find(tool_parser, TOOL_FORMATS, template), _find(reasoning_parser, REASONING_FORMATS, template))


def _find(name: str, formats: Sequence[Format], template: str | None) -> Format | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in formats if _shows(template or "", each)), None)
    for each in formats:
        if each.name == name:
            return each
    known = ", ".join([AUTO, NONE, *(each.name for each in formats)])
    raise UnknownParser(f"{name!r} is no parser; known are {known}")


def _shows(template: str, format_: ToolFormat | ReasoningFormat) -> bool:
    if any(sign in template for sign in format_.foreign_signs):
        return False
    return any(all(sign in template for sign in row) for row in format_.signs)
