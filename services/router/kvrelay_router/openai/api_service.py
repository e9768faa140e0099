"""The collaborators of all endpoints: settings, dispatch and text service."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from kvrelay_router.access.rate_limiter import RateLimiter
from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.dispatch.interface import Dispatcher, GenerateRequest
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.error_mapping import too_many_requests
from kvrelay_router.openai.settings import ApiSettings
from kvrelay_router.text.chat_template import ChatTemplateError, Message
from kvrelay_router.text.service import ChatOptions, TextService

MAX_ALIASES = 4096


class RequestAliases:
    """Maps the ids that clients know to requests of dispatch. Keeps the latest `MAX_ALIASES`."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, list[str]] = OrderedDict()

    def remember(self, names: RequestNames, requests: list[GenerateRequest]) -> None:
        """If a client uses an id again, the id refers to the latest request."""
        for name in {names.public, names.unique}:
            self._names[name] = [request.request_id for request in requests]
            self._names.move_to_end(name)
        while len(self._names) > MAX_ALIASES:
            self._names.popitem(last=False)

    def resolve(self, name: str) -> list[str]:
        """Returns the ids in dispatch. An unknown id may be one itself."""
        return self._names.get(name, [name])


class InProgress:
    """Counts generations in progress. `with` it, a generation runs; entering raises 429 beyond the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_requests = 0

    def __enter__(self) -> None:
        if self.num_requests >= self._limit:
            raise too_many_requests(self._limit)
        self.num_requests += 1

    def __exit__(self, *exc_info: object) -> None:
        self.num_requests -= 1


@dataclass(frozen=True, slots=True)
class ApiService:
    settings: ApiSettings
    dispatcher: Dispatcher
    text: TextService
    in_progress: InProgress
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    aliases: RequestAliases = field(default_factory=RequestAliases)

    def names(self, http: Request) -> RequestNames:
        names: RequestNames = http.scope["state"]["names"]
        return names

    def answer_head(self, answer_id: str, kind: str) -> dict[str, Any]:
        """The first fields of every answer and of each of its chunks."""
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self.settings.model_name}

    async def encode_chat(self, messages: list[Message], options: ChatOptions) -> list[int]:
        """Returns a conversation as tokens. Raises 400 if the template refuses it."""
        try:
            token_ids = await self.text.encode_chat(messages, options)
        except ChatTemplateError as error:
            raise ApiError(f"The messages cannot be rendered: {error}", param="messages") from error
        if not token_ids:
            raise ApiError("The messages give an empty prompt", param="messages")
        return token_ids
