"""POST /invocations, the path of hosting platforms such as SageMaker: the body decides which completion it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.chat_endpoint import ChatEndpoint
from kvrelay_router.openai.completions_endpoint import CompletionsEndpoint
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, TIMINGS
from kvrelay_router.openai.served_models import ServedModels


class InvocationsEndpoint:
    def __init__(self, models: ServedModels, chat: ChatEndpoint, completions: CompletionsEndpoint) -> None:
        self._models, self._chat, self._completions = models, chat, completions

    async def serve(self, http: Request) -> Response:
        """A body with `messages` is a chat completion, one with `prompt` a text completion. Without `model` it is for
        the router's first one: such a platform has one model behind a path."""
        content = await read_json_object(http, self._models.settings.max_body_bytes)
        if content.get("model") is None:
            content["model"] = self._models.settings.model_name
        if "messages" in content:
            return await self._chat.answer(http, content)
        if "prompt" in content:
            if (timings := http.scope["state"][TIMINGS]) is not None:
                timings.operation = OPERATION_BY_PATH["/v1/completions"]
            return await self._completions.answer(http, content)
        raise ApiError("The body must have 'messages' or 'prompt'", param="messages", code="missing_required_parameter")
