"""POST /v1/chat/completions/batch, as in vLLM: several conversations in one request, each of which is a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.api_error import ApiError, wrong
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.answers.parsed_chat_format import ParsedChatAnswer
from kvrelay_router.openai.answers.parsed_choices import ParsedChoices
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_planning import plan_parsed_chats
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.schema.chat_request import PROMPT_TOKENS, ChatRequest, check_messages, parse_chat
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
        planning = plan_parsed_chats(service, names, requests)
        chats = await while_connected(http, service.settings.request_timeout_s, planning)
        answer = BatchedChatAnswer(service, f"chatcmpl-{names.unique}", requests, chats.plan.runs, chats.parsed)
        return GenerationResponse(service, chats.plan, answer)


class BatchedChatAnswer(ParsedChatAnswer):
    """One JSON object. The index of a choice is that of its conversation."""

    def __init__(
        self,
        service: ApiService,
        answer_id: str,
        requests: Sequence[ChatRequest],
        runs: Sequence[PromptRun],
        parsed: ParsedChoices,
    ) -> None:
        head = service.answer_head(answer_id, "chat.completion", requests[0].model)
        super().__init__(head, service.text.tokenizer, requests[0], runs, None, parsed)
        self._conversations = requests

    def _echoed(self, choice: Choice) -> str:
        return self._conversations[choice.index].echoed


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
            await check_messages(chat)
            request = parse_chat(chat)
            requests.append(requests[0].model_copy(update={"messages": request.messages}) if requests else request)
        except ApiError as error:
            if error.param == "messages":
                error.message = f"Conversation {index}: {error.message}"
            raise
        await share.pause()
    return requests
