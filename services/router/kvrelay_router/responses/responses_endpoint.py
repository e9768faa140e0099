"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.request_validation import RequestedOutput
from kvrelay_router.openai.schema.chat_request import check_messages, parse_chat
from kvrelay_router.responses.input_items import input_messages
from kvrelay_router.responses.response_object import ResponseObject
from kvrelay_router.responses.responses_format import ResponseAnswer, ResponseStream, TokenScores
from kvrelay_router.responses.responses_request import (
    ResponsesRequest,
    generation_fields,
    parse_response,
    tool_fields,
)


class ResponsesEndpoint:
    """Converts responses to chat completions, which plan and run them."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service = self._service
        names = service.names(http)
        content = await read_json_object(http, service.settings.max_body_bytes)
        request = parse_response(content)
        if request.previous_response_id is not None:
            raise _not_found(request.previous_response_id)
        messages = await input_messages(request.input, [])
        chat = await _chat_content(request, messages)
        chat_request = parse_chat({**chat, **tool_fields(request), **generation_fields(request, content)})
        output = RequestedOutput(asked=request.max_output_tokens, default=None, param="max_output_tokens")
        plan = await plan_chat(service, names, chat_request, output, prompt_param="input")
        (run,) = plan.runs
        response = ResponseObject(names.unique, request, run)
        scores = TokenScores(service.text.tokenizer, request.top_logprobs if request.wants_logprobs else None)
        answer = ResponseStream if request.stream else ResponseAnswer
        return GenerationResponse(service, plan, answer(response, run, scores))


async def _chat_content(request: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of a chat completion with this prompt. The instructions come first."""
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise ApiError("Invalid value for 'input': it must not be empty", param="input", code="invalid_value")
    chat = {"model": request.model, "messages": messages}
    await check_messages(chat)
    return chat


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        f"Previous response with id '{response_id}' not found",
        status=400,
        param="previous_response_id",
        code="previous_response_not_found",
    )
