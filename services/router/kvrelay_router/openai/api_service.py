"""The collaborators of all endpoints, settings, dispatch and text service, for each model that is served."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.text.chat_template import ChatTemplateError, Message
from kvrelay.text.request.api_error import ApiError, context_length_exceeded, no_worker_ready
from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import ChatOptions, TextService, TextTooLong
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.access.rate_limiter import RateLimiter
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.http.body import read_json_object
from kvrelay_router.http.pending_memory import PendingMemory
from kvrelay_router.openai.error_mapping import model_not_found, too_many_requests
from kvrelay_router.openai.request_metrics import TIMINGS
from kvrelay_router.openai.settings import ApiSettings

MAX_ALIASES = 4096
FREE_SHARE = 8.0
_ANY_ARRAY = '{"type":"array"}'


class RequestAliases:
    """Maps the ids that clients know to requests of dispatch. Keeps the latest `MAX_ALIASES`.

    Clients choose ids, so each API key has its own.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[str | None, str], list[str]] = OrderedDict()

    def remember(self, names: RequestNames, requests: list[GenerateRequest]) -> None:
        """If a client uses an id again, the id refers to the latest request."""
        ids = [request.request_id for request in requests]
        for name in {names.public, names.unique}:
            for key in ((None, name), (requests[0].owner, name)):
                self._names[key] = ids
                self._names.move_to_end(key)
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
    are left for tenants that have none, and one tenant alone gets 8 of 9 places. The same holds for the fleets, with
    weight 1, if there are `several_fleets`: one that stalls leaves places for the others.
    """

    def __init__(self, limit: int, *, shares: bool = False, several_fleets: bool = False) -> None:
        self._limit = limit
        self._shares, self._several_fleets = shares, several_fleets
        self._of_tenants: Counter[str] = Counter()
        self._of_fleets: Counter[str] = Counter()
        self.num_requests = 0

    @contextmanager
    def admit(self, tenant: str, weight: float, fleet: str = "") -> Iterator[None]:
        """A generation of a tenant runs in the block. Raises 429 beyond the limits."""
        free: float = self._limit - self.num_requests
        if self._several_fleets:  # a tenant gets its share of what its fleet may still take
            free = min(free, FREE_SHARE * free - self._of_fleets[fleet])
        if free <= 0 or (self._shares and self._of_tenants[tenant] >= FREE_SHARE * weight * free):
            raise too_many_requests(self._limit)
        places = (self._of_tenants, tenant), (self._of_fleets, fleet)
        self.num_requests += 1
        for counts, name in places:
            counts[name] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            for counts, name in places:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]


@dataclass(frozen=True, slots=True)
class ApiService:
    settings: ApiSettings
    dispatcher: RouterDispatcher
    text: TextService
    in_progress: InProgress
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    aliases: RequestAliases = field(default_factory=RequestAliases)
    memory: PendingMemory = field(default_factory=PendingMemory)

    def names(self, http: Request) -> RequestNames:
        names: RequestNames = http.scope["state"]["names"]
        return names

    def answer_head(self, answer_id: str, kind: str, model: str) -> dict[str, Any]:
        """The first fields of every answer and of each of its chunks. `model`: the name that the request used."""
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}

    async def check_grammar(self, grammar: Grammar, param: str, whitespace_param: str) -> None:
        """Raises 400, about field `param` or `whitespace_param`, if the output cannot be constrained so."""
        try:
            await self.text.grammars.check(grammar)
        except GrammarError as error:
            if grammar.whitespace is not None and param != whitespace_param:
                # Any array is a correct schema, so an error is about the whitespace.
                alone = Grammar(kind=GrammarKind.JSON_SCHEMA, text=_ANY_ARRAY, whitespace=grammar.whitespace)
                await self.check_grammar(alone, whitespace_param, whitespace_param)
            raise ApiError(f"The output cannot be constrained: {error}", param=param) from None

    async def encode_chat(
        self, messages: list[Message], options: ChatOptions, max_tokens: int | None = None, param: str = "messages"
    ) -> list[int]:
        """Returns a conversation as tokens. Raises 400 if the template refuses it, or about field `param` if more than
        `max_tokens` show before all is tokenized."""
        try:
            token_ids = await self.text.encode_chat(messages, options, max_tokens)
        except TextTooLong as error:
            raise context_length_exceeded(str(error), param) from None
        except ChatTemplateError as error:
            raise ApiError(f"The messages cannot be rendered: {error}", param="messages") from error
        if not token_ids:
            raise ApiError("The messages give an empty prompt", param="messages")
        return token_ids


def check_model(settings: ApiSettings, model: str) -> None:
    """Raises 404 for a model that is not served here."""
    if model not in settings.model_names:
        raise model_not_found(model)


def known_limits(dispatcher: RouterDispatcher) -> ModelLimits:
    """Returns the model's limits. Raises 503 while no worker is known."""
    limits = dispatcher.limits()
    if limits is None:
        raise no_worker_ready("No worker is ready", 1.0)
    return limits


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model that a router serves beside its first."""

    names: tuple[str, ...]
    dispatcher: RouterDispatcher
    text: TextService

    def service_beside(self, first: ApiService) -> ApiService:
        """The service of this model. Limits of requests, ids and memory are those of the first service."""
        settings = replace(first.settings, model_names=self.names)
        return replace(first, settings=settings, dispatcher=self.dispatcher, text=self.text)


class ServedModels:
    """One service for each model. They share everything but text service, dispatcher and names."""

    def __init__(self, services: Sequence[ApiService]) -> None:
        self.services = tuple(services)
        self._by_name = {name: service for service in services for name in service.settings.model_names}

    @property
    def first(self) -> ApiService:
        """The service for requests that name no model."""
        return self.services[0]

    @property
    def settings(self) -> ApiSettings:
        """The settings that all services share, and the names of the first."""
        return self.first.settings

    def by_name(self, name: str) -> ApiService | None:
        return self._by_name.get(name)

    def select(self, http: Request, content: dict[str, Any]) -> ApiService:
        """Returns the service of the model that the body names. Without one, or with an unknown one, it is the first,
        whose checks of the request give the error."""
        model = content.get("model")
        service = self._by_name.get(model, self.first) if isinstance(model, str) else self.first
        if (timings := http.scope["state"].get(TIMINGS)) is not None:
            timings.model = service.settings.model_name
        return service

    async def read(self, http: Request) -> tuple[ApiService, dict[str, Any]]:
        """Returns the body as a JSON object, and the service of its model. Raises the errors of `read_json_object`."""
        content = await read_json_object(http, self.settings.max_body_bytes)
        return self.select(http, content), content
