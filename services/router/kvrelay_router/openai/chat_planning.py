"""Plans a conversation's next turn. Every API with conversations uses it."""

from __future__ import annotations

import msgspec

from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.answers.parsed_choices import ParsedChoices
from kvrelay_router.openai.answers.parsed_text import ParsedText
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.planning import EndpointFields, Plan, TokenizedPrompt, check_request, plan_generation
from kvrelay_router.openai.request_validation import RequestedOutput, check_tokenized
from kvrelay_router.openai.schema.chat_request import ChatRequest
from kvrelay_router.openai.tool_grammar import check_tool_grammar, tool_grammar
from kvrelay_router.output_parsing.dialect import Dialect, MarkedDialect


class ParsedPlan(msgspec.Struct, frozen=True):
    """A plan with the parsers of its output."""

    plan: Plan
    parsed: ParsedChoices


async def plan_chat(
    service: ApiService,
    names: RequestNames,
    request: ChatRequest,
    output: RequestedOutput | None = None,
    prompt_param: str = "messages",
) -> Plan:
    """A plan for an API whose answers have no reasoning and no calls: all text is content, and tools are refused.

    `output` replaces the length that the request asks for, and `prompt_param` is the field that errors name.
    Raises ApiError for every mistake in the request.
    """
    return await _plan(service, names, request, MarkedDialect(), _endpoint_fields(request, output, prompt_param))


async def plan_parsed_chat(
    service: ApiService,
    names: RequestNames,
    request: ChatRequest,
    output: RequestedOutput | None = None,
    prompt_param: str = "messages",
) -> ParsedPlan:
    """As `plan_chat`, for an API whose answers have reasoning and calls."""
    dialect = service.text.dialect
    fields = _endpoint_fields(request, output, prompt_param)
    if dialect.is_plain and not request.callable_tools:
        plan = await _plan(service, names, request, dialect, fields)
        return ParsedPlan(plan, ParsedChoices(is_plain=True))
    plan = await _plan(service, names, request, dialect, msgspec.structs.replace(fields, is_parsed=True))
    begins_inside = _begins_inside_reasoning(service, request, plan.runs[0].request.prompt_ids)
    for choice in plan.runs[0].choices:
        choice.count_reasoning(service.text.reasoning_counter(begins_inside=begins_inside))
        parser = dialect.new_parser(request.callable_tools, begins_inside=begins_inside)
        choice.parse_with(ParsedText(parser, hides_reasoning=not request.include_reasoning))
    parsed = ParsedChoices(parallel_calls=request.parallel_tool_calls, include_reasoning=request.include_reasoning)
    return ParsedPlan(plan, parsed)


async def _plan(
    service: ApiService, names: RequestNames, request: ChatRequest, dialect: Dialect, fields: EndpointFields
) -> Plan:
    limits = check_request(service, names, request)
    _check_tools(service, dialect, request)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param, request.whitespace_param)
    max_tokens = limits.max_model_len if request.truncate_prompt_tokens is None else None
    token_ids = await service.encode_chat(request.messages, request.options, max_tokens, fields.prompt_param)
    check_tokenized(token_ids, service.text.tokenizer.vocab_size, limits, fields.prompt_param)
    prompt = TokenizedPrompt(request.truncated(token_ids, fields.output.prompt_room(limits)))
    if request.callable_tools:
        begins_inside = _begins_inside_reasoning(service, request, prompt.token_ids)
        grammar = await tool_grammar(service, request, begins_inside=begins_inside)
        fields = msgspec.structs.replace(fields, grammar=grammar)
    return await plan_generation(service, names, request, fields, [prompt], limits)


def _check_tools(service: ApiService, dialect: Dialect, request: ChatRequest) -> None:
    if not request.callable_tools:
        return
    if not dialect.calls_tools:
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
