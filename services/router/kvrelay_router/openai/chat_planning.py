"""Plans a conversation's next turn. Every API with conversations uses it."""

from __future__ import annotations

from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.planning import EndpointFields, Plan, TokenizedPrompt, check_request, plan_generation
from kvrelay_router.openai.request_validation import RequestedOutput, check_tokenized
from kvrelay_router.openai.schema.chat_request import ChatRequest


async def plan_chat(
    service: ApiService,
    names: RequestNames,
    request: ChatRequest,
    output: RequestedOutput | None = None,
    prompt_param: str = "messages",
) -> Plan:
    """`output` replaces the length that the request asks for, and `prompt_param` is the field that errors name.

    Raises ApiError for every mistake in the request.
    """
    limits = check_request(service, names, request)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param)
    fields = _endpoint_fields(request, output, prompt_param)
    token_ids = await service.encode_chat(request.messages, request.options)
    check_tokenized(token_ids, service.text.tokenizer.vocab_size, limits, fields.prompt_param)
    prompt = TokenizedPrompt(request.truncated(token_ids, fields.output.prompt_room(limits)))
    return await plan_generation(service, names, request, fields, [prompt], limits)


def _endpoint_fields(request: ChatRequest, output: RequestedOutput | None, prompt_param: str) -> EndpointFields:
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return EndpointFields(
        prompt_param=prompt_param,
        output=output or RequestedOutput(asked=request.wanted_tokens, default=None, param=param),
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
