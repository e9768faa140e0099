"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.answers.chat_format import chat_format
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.schema.chat_request import parse_chat
from kvrelay_router.openai.served_models import ServedModels
from kvrelay_router.openai.while_connected import while_connected


class ChatEndpoint:
    """Validates and plans chat completions. The returned response runs them."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        return await self.answer(http, await read_json_object(http, self._models.settings.max_body_bytes))

    async def answer(self, http: Request, content: dict[str, Any]) -> Response:
        """Serves a request whose body was read; see `serve`."""
        service = self._models.select(http, content)
        names = service.names(http)
        request = parse_chat(content)
        plan = await while_connected(http, service.settings.request_timeout_s, plan_chat(service, names, [request]))
        return GenerationResponse(service, plan, chat_format(service, f"chatcmpl-{names.unique}", [request], plan.runs))
