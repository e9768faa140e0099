"""The grammar of an output that must call tools, whose calls must follow strict tools' schemas, or whose answer is one
message among others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.text.output_parsing.call_grammar import WHITESPACE, Marker, MarkerOf, Unconstrainable, format_of
from kvrelay.text.output_parsing.dialect import CallGrammar
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.grammar_fields import MAX_GRAMMAR_BYTES
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import ChatRequest

MAX_GRAMMAR_TOOLS = 100


def check_tool_grammar(service: ApiService, request: ChatRequest) -> None:
    """Raises ApiError for calls that cannot be constrained, or not together with the request's other fields."""
    if not request.constrains_calls:
        return
    if service.text.dialect.call_grammar(_markers(service), begins_inside=False) is None:
        if request.choice.mode == "required" or request.choice.names is not None:
            raise wrong("tool_choice", "for this model only 'auto' and 'none' are supported", "unsupported_parameter")
        return
    if request.grammar is not None:
        what = "a required call" if request.choice.mode == "required" else "calls of allowed or strict tools"
        raise wrong(request.grammar_param, f"the output cannot follow {what} and another constraint")
    if request.use_beam_search:
        raise wrong("use_beam_search", "the output of a beam search cannot be constrained to calls")
    if len(request.callable_tools) > MAX_GRAMMAR_TOOLS:
        reason = f"at most {MAX_GRAMMAR_TOOLS} may be called if one must be, if only some may, or if one is strict"
        raise wrong("tools", reason)


async def chat_grammar(service: ApiService, request: ChatRequest, *, begins_inside: bool) -> Grammar | None:
    """The grammar of the whole output, if it is another one than the request's. Raises 400 if it cannot be followed."""
    if request.grammar is not None:
        return await _answer_grammar(service, request, request.grammar, begins_inside=begins_inside)
    if not request.constrains_calls:
        return None
    return await _tool_grammar(service, request, begins_inside=begins_inside)


async def _answer_grammar(
    service: ApiService, request: ChatRequest, given: Grammar, *, begins_inside: bool
) -> Grammar | None:
    """The request's grammar with what this model writes around its answer. None if that is nothing."""
    if not service.text.dialect.has_channels or request.continue_final_message:
        return None
    content = format_of(given)
    tag_format = service.text.dialect.answer_format(content, _markers(service), begins_inside=begins_inside)
    if tag_format is None:
        return None
    grammar = _grammar(tag_format, given.whitespace, request.grammar_param)
    await service.check_grammar(grammar, request.grammar_param, request.whitespace_param)
    return grammar


async def _tool_grammar(service: ApiService, request: ChatRequest, *, begins_inside: bool) -> Grammar | None:
    """Begins behind the reasoning if workers know where that ends."""
    follows_reasoning = service.text.can_limit_reasoning
    calls = service.text.dialect.call_grammar(
        _markers(service), begins_inside=begins_inside, follows_reasoning=follows_reasoning
    )
    if calls is None:
        return None
    tools, is_required = request.callable_tools, request.choice.mode == "required"
    is_parallel = request.parallel_tool_calls
    try:
        tag_format = calls.required(tools, is_parallel=is_parallel) if is_required else calls.allowed(tools)
    except Unconstrainable as error:
        raise wrong("tools", f"calls cannot be constrained to them: {error}") from None
    grammar = _grammar(tag_format)
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise wrong("tools", f"their grammar has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    try:
        await service.text.grammars.check(grammar)
    except GrammarError as error:
        await _check_each(service, calls, [tool for tool in tools if is_required or tool.is_strict])
        raise wrong("tools", f"calls cannot be constrained to them: {error}") from None
    return grammar


async def _check_each(service: ApiService, calls: CallGrammar, tools: Sequence[Tool]) -> None:
    """Raises 400 for the first tool that cannot be followed."""
    for tool in tools:
        try:
            await service.text.grammars.check(_grammar(calls.required([tool], is_parallel=False)))
        except GrammarError as error:
            raise wrong("tools", f"calls of {tool.name!r} cannot be constrained to its parameters: {error}") from None


def _markers(service: ApiService) -> MarkerOf:
    """The added tokens among texts, as formats of a structural tag. Not all need be special: the library takes some of
    the others for special ones, which texts in a grammar do not match."""

    def marker_of(text: str) -> Marker:
        token_id = service.text.tokenizer.added_id_of(text)
        return text if token_id is None else {"type": "token", "token": token_id, "text": text}

    return marker_of


def _grammar(tag_format: dict[str, Any], whitespace: str | None = WHITESPACE, param: str = "tools") -> Grammar:
    try:
        text = orjson.dumps({"type": "structural_tag", "format": tag_format}).decode()
    except TypeError:  # the format is deeper than the tools that it is made of
        raise wrong(param, "it is nested too deeply") from None
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text, whitespace=whitespace)
