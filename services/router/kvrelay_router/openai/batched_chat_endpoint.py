"""POST /v1/chat/completions/batch, as in vLLM: several conversations in one request, each of which is a choice."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.api_error import ApiError, wrong
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answers.chat_format import chat_format
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.schema.chat_request import PROMPT_TOKENS, ChatRequest, parse_chat
from kvrelay_router.openai.served_models import ServedModels
from kvrelay_router.openai.while_connected import while_connected

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


class BatchedChatEndpoint:
    """The conversations share all fields but their messages. Their prompts run at the same time."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service, content = await self._models.read(http)
        names = service.names(http)
        requests = await _requests(content, service.settings.max_sequences)
        plan = await while_connected(http, service.settings.request_timeout_s, plan_chat(service, names, requests))
        return GenerationResponse(service, plan, chat_format(service, f"chatcmpl-{names.unique}", requests, plan.runs))


async def _requests(content: dict[str, Any], max_conversations: int) -> list[ChatRequest]:
    """One request for each conversation."""
    for name, harmless in NOT_IN_BATCHES.items():
        if content.get(name) not in harmless:
            raise wrong(name, "it is not supported in batches", "unsupported_parameter")
    conversations = content.get("messages")
    if not isinstance(conversations, list) or not all(isinstance(each, list) for each in conversations):
        raise wrong("messages", "it must be a list of conversations, which are lists of messages", "invalid_type")
    if not 0 < len(conversations) <= max_conversations:
        raise wrong("messages", f"a batch has 1 to {max_conversations} conversations")
    requests, share = list[ChatRequest](), LoopShare()
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
        await share.pause()
    return requests
