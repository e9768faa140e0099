"""What all routes share: settings, dispatch, and the text side."""

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
    """Which requests of dispatch belong to a name that the client knows. Remembers the latest ones."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, list[str]] = OrderedDict()

    def remember(self, names: RequestNames, requests: list[GenerateRequest]) -> None:
        """A name that a client uses again stands for the latest request."""
        for name in {names.public, names.unique}:
            self._names[name] = [request.request_id for request in requests]
            self._names.move_to_end(name)
        while len(self._names) > MAX_ALIASES:
            self._names.popitem(last=False)

    def resolve(self, name: str) -> list[str]:
        """The ids in dispatch; an unknown name may be one itself."""
        return self._names.get(name, [name])


class InProgress:
    """Counts the generations in progress, and refuses those beyond the limit. A context manager for each."""

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
    """The collaborators of the routes."""

    settings: ApiSettings
    dispatcher: Dispatcher
    text: TextService
    in_progress: InProgress
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    aliases: RequestAliases = field(default_factory=RequestAliases)

    def names(self, http: Request) -> RequestNames:
        """What this HTTP request is called."""
        names: RequestNames = http.scope["state"]["names"]
        return names

    def answer_head(self, answer_id: str, kind: str) -> dict[str, Any]:
        """The fields that every answer and every chunk of it begins with."""
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self.settings.model_name}

    async def encode_chat(self, messages: list[Message], options: ChatOptions) -> list[int]:
        """A conversation as tokens. Raises 400 for what the template does not take."""
        try:
            token_ids = await self.text.encode_chat(messages, options)
        except ChatTemplateError as error:
            raise ApiError(f"The messages cannot be rendered: {error}", param="messages") from error
        if not token_ids:
            raise ApiError("The messages give an empty prompt", param="messages")
        return token_ids
