"""Plans a conversation's next turn. Every API with conversations uses it.

The output has a grammar if it must call tools, if its calls must follow strict tools' schemas, if it is calls or a text
that the request constrains, or if the answer that a request constrains is one message among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import orjson

from kvrelay.excerpts import quoted
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.output_parsing.call_grammar import WHITESPACE, Marker, MarkerOf, Unconstrainable, format_of
from kvrelay.text.output_parsing.dialect import CallGrammar, Dialect
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.parsed_text import ParsedText
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.generation_fields import MAX_GRAMMAR_BYTES
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
)
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import PROMPT_TOKENS, ChatRequest
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import (
    EndpointFields,
    Plan,
    TokenizedPrompt,
    check_request,
    plan_generation,
    prompt_tokens,
)
from kvrelay_router.openai.tool_fields import check_tool_schemas


async def plan_chat(
    service: ApiService,
    names: RequestNames,
    requests: Sequence[ChatRequest],
    output: RequestedOutput | None = None,
    prompt_param: str = "messages",
) -> Plan:
    """A plan with a run for each of `requests`, which differ in their messages alone. Only a single one may have tools.

    `output` replaces the length that the request asks for, and `prompt_param` is the field that errors name. Raises
    ApiError for every mistake in the requests.
    """
    request = requests[0]
    fields = _endpoint_fields(service, request, output, prompt_param)
    limits = await check_request(service, names, request)
    _check_tools(service, request)
    check_tool_schemas(request.defined_tools)
    _check_reasoning(service, request)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param, request.whitespace_param)
    prompts = [await _prompt(service, each, fields, limits) for each in requests]
    grammar = await chat_grammar(service, request, begins_inside=prompts[0].begins_inside)
    fields = msgspec.structs.replace(fields, grammar=grammar)
    plan = await plan_generation(service, names, request, fields, prompts, limits)
    if fields.is_parsed:
        for run, prompt in zip(plan.runs, prompts, strict=True):
            _parse(service, request, run, prompt)
    return plan


def _dialect(service: ApiService, request: ChatRequest) -> Dialect:
    """The formats of the output."""
    dialect = service.text.dialect
    if request.joins_reasoning:
        dialect = dialect.with_joined_reasoning or dialect
    if request.choice.mode == "required":
        return dialect.for_required_calls(is_named=request.choice.names_one)
    return dialect.beside_format if request.is_calls_or_format else dialect


def _parse(service: ApiService, request: ChatRequest, run: PromptRun, prompt: TokenizedPrompt) -> None:
    """Has the texts of the run parsed."""
    dialect, inside = _dialect(service, request), prompt.begins_inside
    prompt_end = service.text.prompt_end(prompt.token_ids)
    tools, is_required = request.callable_tools, request.choice.mode == "required"
    if is_required:
        tools = tuple(msgspec.structs.replace(tool, is_strict=True) for tool in tools)
    for choice in run.choices:
        parsed = ParsedText(
            dialect.new_parser(tools, begins_inside=inside, prompt_end=prompt_end),
            hides_reasoning=not request.include_reasoning,
            parallel_calls=request.parallel_tool_calls,
            only_calls=is_required,
        )
        choice.parse_with(parsed, service.text.reasoning_counter(begins_inside=inside))


async def _prompt(
    service: ApiService, request: ChatRequest, fields: EndpointFields, limits: ModelLimits
) -> TokenizedPrompt:
    text = service.text
    encode = partial(service.encode_chat, request.messages, request.options, param=fields.prompt_param)
    prompt = request.prompt_token_ids or encode
    token_ids = await prompt_tokens(request, fields, limits, text.tokenizer.vocab_size, prompt)
    token_ids = request.truncated(token_ids, fields.output.prompt_room(limits))
    begins_inside = _begins_inside_reasoning(service, request, token_ids)
    reasoning, budget = None, request.thinking_token_budget
    if request.grammar is not None or budget is not None or request.constrains_calls:
        # The reasoning is in front of what is constrained, unless it has ended.
        has_begun = request.continue_final_message or text.has_ended_reasoning(token_ids)
        if begins_inside or not has_begun:
            reasoning = text.reasoning_before(begins_inside=begins_inside, token_budget=budget)
    return TokenizedPrompt(token_ids, begins_inside=begins_inside, reasoning=reasoning)


def _check_reasoning(service: ApiService, request: ChatRequest) -> None:
    if request.joins_reasoning and service.text.dialect.with_joined_reasoning is None:
        raise wrong("separate_reasoning", "this model's reasoning is a message of its own", "unsupported_parameter")
    if request.thinking_token_budget is None:
        return
    if not service.text.can_limit_reasoning:
        raise wrong(
            "thinking_token_budget",
            "this model writes no reasoning between two tokens, or how it does is not known; start the router with "
            "--reasoning-parser",
            "unsupported_parameter",
        )
    if request.use_beam_search:
        raise wrong("thinking_token_budget", "a beam search cannot have a budget")


def _check_tools(service: ApiService, request: ChatRequest) -> None:
    if not request.callable_tools:
        return
    if not _dialect(service, request).calls_tools:
        raise ApiError(
            "How this model calls tools is not known; leave 'tools' out, set 'tool_choice' to \"none\", \"required\" "
            "or a function, or start the router with --tool-parser",
            param="tools",
            code="unsupported_parameter",
        )
    check_tool_grammar(service, request)


def _begins_inside_reasoning(service: ApiService, request: ChatRequest, prompt_ids: list[int]) -> bool:
    """A continued message says itself whether its reasoning is open."""
    if not request.continue_final_message:
        return service.text.begins_inside_reasoning(prompt_ids)
    content = request.messages[-1].get("content")
    final = content if isinstance(content, str) else content[-1]["text"] if content else ""
    return service.text.dialect.is_open_in(final)


def _endpoint_fields(
    service: ApiService, request: ChatRequest, output: RequestedOutput | None, prompt_param: str
) -> EndpointFields:
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    most = service.text.sampling_defaults.max_tokens
    return EndpointFields(
        prompt_param=PROMPT_TOKENS if request.prompt_token_ids else prompt_param,
        output=output or RequestedOutput(asked=request.wanted_tokens, default=None, model_default=most, param=param),
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        is_parsed=not service.text.dialect.is_plain or bool(request.callable_tools),
    )


MAX_GRAMMAR_TOOLS = 100


def check_tool_grammar(service: ApiService, request: ChatRequest) -> None:
    """Raises ApiError for calls that cannot be constrained, or not together with the request's other fields."""
    if not request.constrains_calls and not request.is_calls_or_format:
        return
    if _dialect(service, request).call_grammar(_markers(service), begins_inside=False) is None:
        if request.choice.mode == "required" or request.choice.names is not None:
            raise wrong("tool_choice", "for this model only 'auto' and 'none' are supported", "unsupported_parameter")
        if request.is_calls_or_format:
            reason = (
                "this model's calls have no grammar, so its output cannot be calls or follow a format; leave it out"
            )
            raise wrong(request.grammar_param, f"{reason}, or set 'tool_choice' to \"none\"", "unsupported_parameter")
        return
    if request.grammar is not None and request.grammar.kind is GrammarKind.STRUCTURAL_TAG:
        what = "a required call" if request.choice.mode == "required" else "calls of allowed or strict tools"
        raise wrong(request.grammar_param, f"the output cannot follow {what} and a structural tag")
    if request.use_beam_search:
        raise wrong("use_beam_search", "the output of a beam search cannot be constrained to calls")
    if len(request.callable_tools) > MAX_GRAMMAR_TOOLS:
        reason = "may be called if one must be, if only some may, if one is strict, or beside an output format"
        raise wrong("tools", f"at most {MAX_GRAMMAR_TOOLS} {reason}")


async def chat_grammar(service: ApiService, request: ChatRequest, *, begins_inside: bool) -> Grammar | None:
    """The grammar of the whole output, if it is another one than the request's. Raises 400 if it cannot be followed."""
    given, is_required = request.grammar, request.choice.mode == "required"
    # Behind the beginning of a message in a channel no call can stand.
    is_answer = request.continue_final_message and service.text.dialect.has_channels and not is_required
    if given is not None and (is_answer or not (is_required or request.is_calls_or_format)):
        return await _answer_grammar(service, request, given, begins_inside=begins_inside)
    if given is None and not request.constrains_calls:
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
    """Of calls; beside a format of calls or a text, of which each output is one. Begins behind the reasoning if workers
    know where that ends."""
    follows_reasoning = service.text.can_limit_reasoning
    calls = _dialect(service, request).call_grammar(
        _markers(service), begins_inside=begins_inside, follows_reasoning=follows_reasoning
    )
    if calls is None:
        return None
    tools, is_required = request.callable_tools, request.choice.mode == "required"
    is_parallel = request.parallel_tool_calls
    given = request.grammar if request.is_calls_or_format else None
    try:
        if is_required:
            tag_format = calls.required(tools, is_parallel=is_parallel)
        elif given is None:
            tag_format = calls.allowed(tools)
        else:
            tag_format = calls.or_text(format_of(given), tools, is_parallel=is_parallel)
    except Unconstrainable as error:
        raise wrong("tools", f"calls cannot be constrained to them: {error}") from None
    grammar = _grammar(tag_format, WHITESPACE if given is None else given.whitespace)
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        what = "their grammar" if given is None else f"their grammar and that of '{request.grammar_param}'"
        raise wrong("tools", f"{what} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    try:
        await service.text.grammars.check(grammar)
    except GrammarError as error:
        await _check_each(service, calls, [tool for tool in tools if is_required or tool.is_strict])
        if given is not None:
            reason = "it cannot be followed beside these tools, or its texts cannot be told from calls"
            raise wrong(request.grammar_param, f"{reason}: {error}") from None
        raise wrong("tools", f"calls cannot be constrained to them: {error}") from None
    return grammar


async def _check_each(service: ApiService, calls: CallGrammar, tools: Sequence[Tool]) -> None:
    """Raises 400 for the first tool that cannot be followed."""
    for tool in tools:
        try:
            await service.text.grammars.check(_grammar(calls.required([tool], is_parallel=False)))
        except GrammarError as error:
            reason = f"calls of {quoted(tool.name)} cannot be constrained to its parameters: {error}"
            raise wrong("tools", reason) from None


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
