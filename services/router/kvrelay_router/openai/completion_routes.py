"""POST /v1/completions, /v1/chat/completions, /v1/chat/completions/batch and /invocations."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.completion_request import parse_completion
from kvrelay_router.http.body import read_json_object
from kvrelay_router.http.client_watch import while_connected
from kvrelay_router.openai.answers.chat_format import chat_format
from kvrelay_router.openai.answers.completion_format import completion_format
from kvrelay_router.openai.api_service import ServedModels
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.chat_request import PROMPT_TOKENS, ChatRequest, parse_chat
from kvrelay_router.openai.completion_planning import plan_completion
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, TIMINGS

NOT_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "tools": (None, []),
    "use_beam_search": (None, False),
    "n": (None, 1),
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    PROMPT_TOKENS: (None, []),
}
"""Fields that batches refuse, with the values that change nothing."""

WITH_MESSAGES = ("model", "continue_final_message", "add_generation_prompt")
"""Fields that every conversation is checked with. The others, which may be large, are read once for all."""


class CompletionRoutes:
    """Validates and plans completions of texts and chats; the returned responses run them. The endpoints raise ApiError
    for every mistake in a request, and have submitted nothing by then."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def completion(self, http: Request) -> Response:
        return await self._complete(http, await self._read(http))

    async def chat(self, http: Request) -> Response:
        return await self._chat(http, await self._read(http))

    async def batched_chat(self, http: Request) -> Response:
        """As in vLLM: several conversations in one request, each of which is a choice. They share all fields but their
        messages, and their prompts run at the same time."""
        return await self._chat(http, await self._read(http), is_batch=True)

    async def invocation(self, http: Request) -> Response:
        """The path of hosting platforms such as SageMaker. A body with `messages` is a chat completion, one with
        `prompt` a text completion. Without `model` it is for the router's first one: such a platform has one model
        behind a path."""
        content = await self._read(http)
        if content.get("model") is None:
            content["model"] = self._models.settings.model_name
        if "messages" in content:
            return await self._chat(http, content)
        if "prompt" in content:
            http.scope["state"][TIMINGS].operation = OPERATION_BY_PATH["/v1/completions"]
            return await self._complete(http, content)
        raise ApiError("The body must have 'messages' or 'prompt'", param="messages", code="missing_required_parameter")

    async def _read(self, http: Request) -> dict[str, Any]:
        return await read_json_object(http, self._models.settings.max_body_bytes)

    async def _complete(self, http: Request, content: dict[str, Any]) -> Response:
        service = self._models.select(http, content)
        names, request = service.names(http), parse_completion(content)
        planning = plan_completion(service, names, request)
        plan, echoed = await while_connected(http, service.settings.request_timeout_s, planning)
        answer = completion_format(service, f"cmpl-{names.unique}", request, plan.runs, echoed)
        return GenerationResponse(service, plan, answer)

    async def _chat(self, http: Request, content: dict[str, Any], *, is_batch: bool = False) -> Response:
        service = self._models.select(http, content)
        names, limit = service.names(http), service.settings.max_sequences
        requests = _conversations(content, limit) if is_batch else [parse_chat(content)]
        plan = await while_connected(http, service.settings.request_timeout_s, plan_chat(service, names, requests))
        return GenerationResponse(service, plan, chat_format(service, f"chatcmpl-{names.unique}", requests, plan.runs))


def _conversations(content: dict[str, Any], max_conversations: int) -> list[ChatRequest]:
    """One request for each conversation."""
    for name, harmless in NOT_IN_BATCHES.items():
        if content.get(name) not in harmless:
            raise wrong(name, "it is not supported in batches", "unsupported_parameter")
    conversations = content.get("messages")
    if not isinstance(conversations, list) or not all(isinstance(each, list) for each in conversations):
        raise wrong("messages", "it must be a list of conversations, which are lists of messages", "invalid_type")
    if not 0 < len(conversations) <= max_conversations:
        raise wrong("messages", f"a batch has 1 to {max_conversations} conversations")
    requests: list[ChatRequest] = []
    for index, messages in enumerate(conversations):
        shared = {name: content[name] for name in WITH_MESSAGES if name in content} if requests else content
        chat = {**shared, "messages": messages}
        try:
            request = parse_chat(chat)
            requests.append(requests[0].model_copy(update={"messages": request.messages}) if requests else request)
        except ApiError as error:
            if error.param == "messages":
                error.message = f"Conversation {index}: {error.message}"
            raise
    return requests
