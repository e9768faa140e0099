"""Plans a conversation's next turn. Every API with conversations uses it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.text.parsed_text import ParsedText
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_token_ids,
    check_tokenized,
)
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import PROMPT_TOKENS, ChatRequest
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import EndpointFields, Plan, TokenizedPrompt, check_request, plan_generation
from kvrelay_router.openai.tool_fields import check_tool_schemas
from kvrelay_router.openai.tool_grammar import chat_grammar, check_tool_grammar


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
    limits = check_request(service, names, request)
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


def _parse(service: ApiService, request: ChatRequest, run: PromptRun, prompt: TokenizedPrompt) -> None:
    """Has the texts of the run parsed."""
    dialect, inside = service.text.dialect, prompt.begins_inside
    if request.joins_reasoning:
        dialect = dialect.without_reasoning or dialect
    prompt_end = service.text.prompt_end(prompt.token_ids)
    for choice in run.choices:
        parsed = ParsedText(
            dialect.new_parser(request.callable_tools, begins_inside=inside, prompt_end=prompt_end),
            hides_reasoning=not request.include_reasoning,
            parallel_calls=request.parallel_tool_calls,
            only_calls=request.choice.mode == "required",
        )
        choice.parse_with(parsed, service.text.reasoning_counter(begins_inside=inside))


async def _prompt(
    service: ApiService, request: ChatRequest, fields: EndpointFields, limits: ModelLimits
) -> TokenizedPrompt:
    text = service.text
    if request.prompt_token_ids:
        token_ids = request.prompt_token_ids
        if request.truncate_prompt_tokens is None:
            allowed_output(len(token_ids), fields.output, limits, fields.prompt_param)
        check_token_ids(token_ids, limits, fields.prompt_param)
    else:
        max_tokens = limits.max_model_len if request.truncate_prompt_tokens is None else None
        token_ids = await service.encode_chat(request.messages, request.options, max_tokens, fields.prompt_param)
        check_tokenized(token_ids, text.tokenizer.vocab_size, limits, fields.prompt_param)
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
    if request.joins_reasoning and service.text.dialect.without_reasoning is None:
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


def _endpoint_fields(
    service: ApiService, request: ChatRequest, output: RequestedOutput | None, prompt_param: str
) -> EndpointFields:
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return EndpointFields(
        prompt_param=PROMPT_TOKENS if request.prompt_token_ids else prompt_param,
        output=output or RequestedOutput(asked=request.wanted_tokens, default=None, param=param),
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        is_parsed=not service.text.dialect.is_plain or bool(request.callable_tools),
    )
