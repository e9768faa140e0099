"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.answers.chat_format import chat_format
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.planning import EndpointFields, TokenizedPrompt, check_request, plan_generation
from kvrelay_router.openai.request_validation import RequestedOutput, check_tokenized
from kvrelay_router.openai.schema.chat_request import ChatRequest, check_messages, parse_chat


class ChatEndpoint:
    """Validates and plans chat completions. The returned response runs them."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service = self._service
        names = service.names(http)
        content = await read_json_object(http, service.settings.max_body_bytes)
        await check_messages(content)
        request = parse_chat(content)
        limits = check_request(service, names, request)
        await service.check_grammar(request.grammar, request.grammar_param)
        fields = _endpoint_fields(request)
        token_ids = await service.encode_chat(request.messages, request.options)
        check_tokenized(token_ids, service.text.tokenizer.vocab_size, limits, fields.prompt_param)
        prompt = TokenizedPrompt(request.truncated(token_ids, fields.output.prompt_room(limits)))
        plan = await plan_generation(service, names, request, fields, [prompt], limits)
        answer = chat_format(service, f"chatcmpl-{names.unique}", request, plan.runs)
        return GenerationResponse(service, plan, answer)


def _endpoint_fields(request: ChatRequest) -> EndpointFields:
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return EndpointFields(
        prompt_param="messages",
        output=RequestedOutput(asked=request.wanted_tokens, default=None, param=param),
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
