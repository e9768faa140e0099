"""The settings of the HTTP API, and the collaborators of all endpoints for each model that is served."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from kvrelay.config.router import MAX_BODY_BYTES, RouterConfig
from kvrelay.excerpts import quoted
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.chat_template import ChatTemplateError, Message
from kvrelay.text.request.api_error import ApiError, context_length_exceeded, no_worker_ready
from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import ChatOptions, TextService, TextTooLong
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from kvrelay_router.access.rate_limiter import InProgress, RateLimiter
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.http.body import PendingMemory, read_json_object
from kvrelay_router.openai.request_metrics import TIMINGS

MAX_ALIASES = 4096
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "select-", "generative-scoring-", "msg_", "resp_")
_ANY_ARRAY = '{"type":"array"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Requests may use any of `model_names`; answers carry the name that the request used."""

    model_names: tuple[str, ...]
    router_id: str = "router"
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may call the API; "*" allows all
    root_path: str = ""  # a proxy's prefix of all paths
    max_body_bytes: int = MAX_BODY_BYTES
    max_answer_bytes: int = 64 << 20
    request_timeout_s: float = 600.0
    max_requests: int = 1024  # maximum requests in progress; further ones get 429
    keys: KeyRing = field(default_factory=KeyRing)
    max_sequences: int = 1024  # maximum prompts times choices of one HTTP request
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_config(cls, config: RouterConfig) -> ApiSettings:
        return cls(
            model_names=config.model_names,
            router_id=config.router_id,
            allowed_origins=config.allowed_origins,
            root_path=config.root_path,
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_queued_requests,
            keys=KeyRing(AcceptedKeys.of(config)),
        )

    @property
    def model_name(self) -> str:
        return self.model_names[0]


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
        """Returns the ids in dispatch of the latest request of this owner (None: of any), by its id or its answer's. An
        unknown id may be one itself."""
        bare = next((name.removeprefix(each) for each in ANSWER_PREFIXES if name.startswith(each)), name)
        spellings = list(dict.fromkeys((name, bare)))
        return next((ids for each in spellings if (ids := self._names.get((owner, each)))), spellings)


@dataclass(frozen=True, slots=True)
class ApiService:
    settings: ApiSettings
    dispatcher: RouterDispatcher
    text: TextService
    in_progress: InProgress
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    aliases: RequestAliases = field(default_factory=RequestAliases)
    memory: PendingMemory = field(default_factory=PendingMemory)

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


def model_not_found(model: str) -> ApiError:
    """404 for a model that is not served here."""
    message = f"The model {quoted(model)} does not exist; GET /v1/models lists the names that are served"
    return ApiError(message, status=404, param="model", code="model_not_found")


def check_model(settings: ApiSettings, model: str) -> None:
    """Raises 404 for a model that is not served here."""
    if model not in settings.model_names:
        raise model_not_found(model)


async def known_limits(dispatcher: RouterDispatcher) -> ModelLimits:
    """Returns the model's limits, which the first worker tells. Raises 503 if none comes."""
    limits = await dispatcher.first_limits()
    if limits is None:
        raise no_worker_ready("No worker is ready", 1.0)
    return limits


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model that a router serves beside its first."""

    names: tuple[str, ...]
    dispatcher: RouterDispatcher
    text: TextService


class ServedModels:
    """One service for each model. They share everything but text service, dispatcher and names."""

    def __init__(self, first: ApiService, further: Sequence[FurtherModel] = ()) -> None:
        services = [first]
        for model in further:
            settings = replace(first.settings, model_names=model.names)
            services.append(replace(first, settings=settings, dispatcher=model.dispatcher, text=model.text))
        self.services = tuple(services)
        self._by_name = {name: service for service in services for name in service.settings.model_names}

    @property
    def first(self) -> ApiService:
        """The service for requests that name no model."""
        return self.services[0]

    def by_name(self, name: str) -> ApiService | None:
        return self._by_name.get(name)

    async def read(self, http: Request) -> tuple[ApiService, dict[str, Any]]:
        """Returns the service of the model that the body names, and the body. Without a model, or with an unknown one,
        it is the first service, whose checks of the request give the error. Raises the errors of `read_json_object`."""
        content = await read_json_object(http, self.first.settings.max_body_bytes)
        model = content.get("model")
        service = self._by_name.get(model, self.first) if isinstance(model, str) else self.first
        if (timings := http.scope["state"].get(TIMINGS)) is not None:
            timings.model = service.settings.model_name
        return service, content
