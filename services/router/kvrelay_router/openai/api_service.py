"""The collaborators of all endpoints: settings, dispatch and text service."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar
from kvrelay_router.access.rate_limiter import RateLimiter
from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.dispatch.interface import Dispatcher, GenerateRequest
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.error_mapping import too_many_requests
from kvrelay_router.openai.settings import ApiSettings
from kvrelay_router.pending_memory import PendingMemory
from kvrelay_router.text.chat_template import ChatTemplateError, Message
from kvrelay_router.text.service import ChatOptions, TextService

MAX_ALIASES = 4096
FREE_SHARE = 8.0


class RequestAliases:
    """Maps the ids that clients know to requests of dispatch. Keeps the latest `MAX_ALIASES`.

    Clients choose ids, so each API key has its own.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[str | None, str], list[str]] = OrderedDict()

    def remember(self, names: RequestNames, requests: list[GenerateRequest]) -> None:
        """If a client uses an id again, the id refers to the latest request."""
        for name in {names.public, names.unique}:
            for owner in {None, requests[0].owner}:
                self._names[owner, name] = [request.request_id for request in requests]
                self._names.move_to_end((owner, name))
        while len(self._names) > MAX_ALIASES:
            self._names.popitem(last=False)

    def resolve(self, name: str, owner: str | None = None) -> list[str]:
        """Returns the ids in dispatch, of the latest request of this owner (None: of any). An unknown id may be one
        itself."""
        return self._names.get((owner, name), [name])


class InProgress:
    """Counts generations in progress, at most `limit`.

    `shares`: several tenants may come. Then one may have `FREE_SHARE` times as many as there are free places, times its
    weight (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). So places
    are left for tenants that have none, and one tenant alone gets 8 of 9 places.
    """

    def __init__(self, limit: int, *, shares: bool = False) -> None:
        self._limit = limit
        self._shares = shares
        self._of_tenants: Counter[str] = Counter()
        self.num_requests = 0

    @contextmanager
    def admit(self, tenant: str, weight: float) -> Iterator[None]:
        """A generation of a tenant runs inside. Entering raises 429 beyond the limits."""
        free, own = self._limit - self.num_requests, self._of_tenants[tenant]
        if free <= 0 or (self._shares and own >= FREE_SHARE * weight * free):
            raise too_many_requests(self._limit)
        self._of_tenants[tenant] = own + 1
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]


@dataclass(frozen=True, slots=True)
class ApiService:
    settings: ApiSettings
    dispatcher: Dispatcher
    text: TextService
    in_progress: InProgress
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    aliases: RequestAliases = field(default_factory=RequestAliases)
    memory: PendingMemory = field(default_factory=PendingMemory)

    def names(self, http: Request) -> RequestNames:
        names: RequestNames = http.scope["state"]["names"]
        return names

    def answer_head(self, answer_id: str, kind: str) -> dict[str, Any]:
        """The first fields of every answer and of each of its chunks."""
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self.settings.model_name}

    async def check_grammar(self, grammar: Grammar | None) -> None:
        """Raises 400 if the output cannot be constrained so."""
        if grammar is not None:
            try:
                await self.text.grammars.check(grammar)
            except GrammarError as error:
                raise ApiError(f"The output cannot be constrained: {error}", param=grammar.kind.value) from None

    async def encode_chat(self, messages: list[Message], options: ChatOptions) -> list[int]:
        """Returns a conversation as tokens. Raises 400 if the template refuses it."""
        try:
            token_ids = await self.text.encode_chat(messages, options)
        except ChatTemplateError as error:
            raise ApiError(f"The messages cannot be rendered: {error}", param="messages") from error
        if not token_ids:
            raise ApiError("The messages give an empty prompt", param="messages")
        return token_ids
