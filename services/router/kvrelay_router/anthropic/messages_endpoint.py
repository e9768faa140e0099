"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.text.request.api_error import fields_named
from kvrelay.text.request.parsing import parse
from kvrelay.text.request.validation import RequestedOutput
from kvrelay_router.anthropic.conversation import chat_messages
from kvrelay_router.anthropic.messages_format import message_format
from kvrelay_router.anthropic.messages_request import (
    FIELD_NAMES,
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
    generation_fields,
    template_fields,
    thinking_budget,
    tool_fields,
)
from kvrelay_router.http.client_watch import while_connected
from kvrelay_router.http.error_response import json_response
from kvrelay_router.openai.api_service import ServedModels, check_model
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.chat_request import parse_chat
from kvrelay_router.openai.delivery import GenerationResponse


class MessagesEndpoint:
    """Converts messages to chat completions, which plan and run them."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service, content = await self._models.read(http)
        names = service.names(http)
        request = parse(MessagesRequest, content)
        chat = _chat_content(request, content)
        budget = thinking_budget(request)
        if budget is not None and service.text.can_limit_reasoning:
            chat["thinking_token_budget"] = budget
        # An output that the context has no room for is cut, as in Anthropic's API.
        output = RequestedOutput(asked=None, default=request.max_tokens)
        with fields_named(FIELD_NAMES):
            chat_request = parse_chat({**chat, **generation_fields(request, content)})
            planning = plan_chat(service, names, [chat_request], output)
            plan = await while_connected(http, service.settings.request_timeout_s, planning)
        (run,) = plan.runs
        return GenerationResponse(service, plan, message_format(f"msg_{names.unique}", chat_request, run))

    async def count_tokens(self, http: Request) -> Response:
        """Counts the tokens of a prompt, special tokens included."""
        service, content = await self._models.read(http)
        request = parse(CountTokensRequest, content)
        check_model(service.settings, request.model)
        chat_request = parse_chat(_chat_content(request, content))
        token_ids = await service.encode_chat(chat_request.messages, chat_request.options)
        return json_response({"input_tokens": len(token_ids)})


def _chat_content(request: PromptFields, content: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion with this prompt."""
    messages = chat_messages(request)
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    chat |= template_fields(request, content) | tool_fields(request)
    last = messages[-1] if messages else {}
    # A last message of the assistant is the beginning of the answer.
    chat["continue_final_message"] = last.get("role") == "assistant" and not last.get("tool_calls")
    return chat
