"""Plans a conversation's next turn. Every API with conversations uses it."""

from __future__ import annotations

import msgspec

from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.http.api_error import ApiError, wrong
from kvrelay_router.openai.answers.parsed_choices import ParsedChoices
from kvrelay_router.openai.answers.parsed_text import ParsedText
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.planning import EndpointFields, Plan, TokenizedPrompt, check_request, plan_generation
from kvrelay_router.openai.request_validation import RequestedOutput, check_tokenized
from kvrelay_router.openai.schema.chat_request import ChatRequest
from kvrelay_router.openai.tool_grammar import check_tool_grammar, tool_grammar, wants_tool_grammar


class ParsedPlan(msgspec.Struct, frozen=True):
    """A plan with the parsers of its output."""

    plan: Plan
    parsed: ParsedChoices


async def plan_parsed_chat(
    service: ApiService,
    names: RequestNames,
    request: ChatRequest,
    output: RequestedOutput | None = None,
    prompt_param: str = "messages",
) -> ParsedPlan:
    """`output` replaces the length that the request asks for, and `prompt_param` is the field that errors name.

    Raises ApiError for every mistake in the request.
    """
    dialect = service.text.dialect
    fields = _endpoint_fields(request, output, prompt_param)
    if dialect.is_plain and not request.callable_tools:
        plan = await _plan(service, names, request, fields)
        return ParsedPlan(plan, ParsedChoices(is_plain=True))
    plan = await _plan(service, names, request, msgspec.structs.replace(fields, is_parsed=True))
    begins_inside = _begins_inside_reasoning(service, request, plan.runs[0].request.prompt_ids)
    for choice in plan.runs[0].choices:
        choice.count_reasoning(service.text.reasoning_counter(begins_inside=begins_inside))
        parser = dialect.new_parser(request.callable_tools, begins_inside=begins_inside)
        choice.parse_with(ParsedText(parser, hides_reasoning=not request.include_reasoning))
    parsed = ParsedChoices(parallel_calls=request.parallel_tool_calls, include_reasoning=request.include_reasoning)
    return ParsedPlan(plan, parsed)


async def _plan(service: ApiService, names: RequestNames, request: ChatRequest, fields: EndpointFields) -> Plan:
    limits = check_request(service, names, request)
    _check_tools(service, request)
    _check_reasoning(service, request)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param, request.whitespace_param)
    max_tokens = limits.max_model_len if request.truncate_prompt_tokens is None else None
    token_ids = await service.encode_chat(request.messages, request.options, max_tokens, fields.prompt_param)
    check_tokenized(token_ids, service.text.tokenizer.vocab_size, limits, fields.prompt_param)
    prompt = TokenizedPrompt(request.truncated(token_ids, fields.output.prompt_room(limits)))
    if request.grammar is not None or request.thinking_token_budget is not None or wants_tool_grammar(request):
        fields = await _constrained(service, request, fields, prompt.token_ids)
    return await plan_generation(service, names, request, fields, [prompt], limits)


async def _constrained(
    service: ApiService, request: ChatRequest, fields: EndpointFields, prompt_ids: list[int]
) -> EndpointFields:
    """Adds the grammar of calls, and the reasoning before what is constrained."""
    begins_inside = _begins_inside_reasoning(service, request, prompt_ids)
    span = service.text.reasoning_span(begins_inside=begins_inside, token_budget=request.thinking_token_budget)
    grammar = None
    if request.callable_tools:
        grammar = await tool_grammar(service, request, begins_inside=begins_inside, follows_reasoning=span is not None)
    has_begun = request.continue_final_message or service.text.has_ended_reasoning(prompt_ids)
    reasoning = None if has_begun and not begins_inside else span
    return msgspec.structs.replace(fields, grammar=grammar, reasoning=reasoning)


def _check_reasoning(service: ApiService, request: ChatRequest) -> None:
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
    if not service.text.dialect.calls_tools:
        raise ApiError(
            "Tool calls are not supported here, or how this model calls tools is not known; leave 'tools' out, set "
            "'tool_choice' to \"none\", or start the router with --tool-parser",
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


def _endpoint_fields(request: ChatRequest, output: RequestedOutput | None, prompt_param: str) -> EndpointFields:
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return EndpointFields(
        prompt_param=prompt_param,
        output=output or RequestedOutput(asked=request.wanted_tokens, default=None, param=param),
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
