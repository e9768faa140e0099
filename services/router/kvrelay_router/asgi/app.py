"""Builds the ASGI application: middleware, routes, and the page `/docs`, which describes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from kvrelay.excerpts import shortened
from kvrelay.fleet.key_limits import OwnLimits, SharedLimits
from kvrelay.telemetry.pages import Page
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.service import TextService
from kvrelay_router.access.rate_limiter import InProgress, RateLimiter
from kvrelay_router.anthropic.messages_request import MessagesRequest, PromptFields
from kvrelay_router.asgi.answers import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    DetokenizedText,
    Health,
    InputItems,
    Message,
    MessageTokens,
    Model,
    Models,
    Ready,
    Requests,
    ResponseObject,
    ResponseTokens,
    Scoring,
    Selection,
    Timelines,
    TokenizedText,
    Version,
)
from kvrelay_router.asgi.api_description import (
    LARGEST,
    OF_RESPONSES,
    OF_SESSION,
    PAGE_QUERIES,
    SESSIONS,
    batched,
    bodies,
    describe,
    operation,
    without_model,
)
from kvrelay_router.asgi.endpoints import (
    DetokenizeTokens,
    GenerationEndpoints,
    TokenEndpoints,
    TokenizeChat,
    TokenizeText,
)
from kvrelay_router.asgi.middleware import OPEN_PATHS, AuthMiddleware, Endpoint
from kvrelay_router.asgi.operations import PAGE_HEADERS, OperationRoutes
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.http.body import PendingMemory
from kvrelay_router.http.error_response import error_response
from kvrelay_router.openai.api_service import ApiService, ApiSettings, FurtherModel, ServedModels
from kvrelay_router.openai.chat_request import ChatRequest
from kvrelay_router.openai.delivery import as_api_error
from kvrelay_router.openai.generative_scoring import ScoringRequest
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, RequestMetrics
from kvrelay_router.openai.select import SelectChat, SelectText
from kvrelay_router.responses.response_store import ResponseStore, StoredConversations
from kvrelay_router.responses.responses_request import ResponsesRequest

SHOWN_HEADERS = (
    "x-request-id",
    "retry-after",
    "x-kvrelay-router",
    "x-kvrelay-prefill",
    "x-kvrelay-decode",
    "x-kvrelay-numerics",
    "x-kvrelay-route",
)
"""Response headers that web pages of other origins may read, in addition to the default ones."""


def create_app(
    settings: ApiSettings,
    dispatcher: RouterDispatcher,
    text: TextService,
    limits: SharedLimits | OwnLimits | None = None,
    metrics: RequestMetrics | None = None,
    memory: PendingMemory | None = None,
    metrics_page: Callable[[], Page] | None = None,
    further: Sequence[FurtherModel] = (),
    responses: ResponseStore | None = None,
) -> ASGIApp:
    """The ASGI application. The caller closes dispatchers, text services and limits. `metrics_page` is what /metrics
    answers, if it is to be served. `further`: models beside that of `settings`. `responses`: None stores none."""
    rate_limiter = RateLimiter(settings.keys, limits)
    in_progress = InProgress(settings.max_requests, settings.keys, several_fleets=bool(further))
    memory = memory or PendingMemory()
    service = ApiService(settings, dispatcher, text, in_progress, rate_limiter, memory=memory)
    models = ServedModels(service, further)
    app = FastAPI(title="kvrelay", redirect_slashes=False, docs_url=None, redoc_url=None)
    if settings.root_path:
        app.servers = [{"url": settings.root_path}]
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_posts(app, models, responses)
    _add_operations(app, models)
    _add_api_page(app, settings.model_name)
    if metrics_page is not None:
        _add_metrics(app, metrics_page)
    names = [name for each in models.services for name in each.settings.model_names]
    describing = cache(partial(describe, app, names, OPEN_PATHS))
    app.openapi = lambda: describing(  # type: ignore[method-assign]
        _vocabulary_size(models), needs_key=bool(settings.keys.accepted.keys)
    )
    named = AuthMiddleware(
        app,
        _endpoints(app, OPERATION_BY_PATH),
        keys=settings.keys,
        router_id=settings.router_id,
        root_path=settings.root_path,
        metrics=metrics or RequestMetrics(settings.model_name),
        memory=memory,
    )
    return _for_web_pages(named, settings.allowed_origins) if settings.allowed_origins else named


def _vocabulary_size(models: ServedModels) -> int | None:
    """That of the model with the smallest vocabulary, None while no worker is known."""
    limits = [each.dispatcher.limits() for each in models.services]
    return min((each.vocab_size for each in limits if each is not None), default=None)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error), request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    path = shortened(request.url.path)
    if status == 404:
        message, code = f"Unknown request URL: {request.method} {path}", "unknown_url"
    elif status == 405:
        message, code = f"Method {request.method} is not allowed for {path}", "method_not_allowed"
        # Starlette's header has the methods of one route, and a path may have several.
        routes = request.app.routes
        first = next(each.path for each in routes if each.matches(request.scope)[0] is not Match.NONE)
        methods = {method for each in routes if each.path == first for method in each.methods}
        headers = {"allow": ", ".join(sorted(methods))}
    else:
        message, code = error.detail, None
    return error_response(ApiError(message, status=status, code=code, headers=headers), request.url.path)


def _endpoints(app: FastAPI, paths: Iterable[str]) -> dict[str, Endpoint]:
    """The endpoints of these paths in the application's own route table, by path."""
    return {route.path: route.endpoint for route in app.routes if isinstance(route, APIRoute) and route.path in paths}


def _for_web_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Answers the preflight requests of browsers, which carry no key."""
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=SHOWN_HEADERS
    )


def _add_posts(app: FastAPI, models: ServedModels, store: ResponseStore | None) -> None:
    conversations = StoredConversations(store)
    generations, tokens = GenerationEndpoints(models, conversations), TokenEndpoints(models, conversations)
    chat = operation(ChatCompletion, body=[ChatRequest], streams=True)
    either = operation(ChatCompletion, Completion, body=[ChatRequest, CompletionRequest], streams=True)
    response = operation(ResponseObject, body=[ResponsesRequest], streams=True, links=OF_RESPONSES)
    routes: list[tuple[str, Any, dict[str, Any]]] = [
        ("/v1/completions", generations.completion, operation(Completion, body=[CompletionRequest], streams=True)),
        ("/v1/chat/completions", generations.chat, chat),
        (
            "/v1/chat/completions/batch",
            generations.batched_chat,
            batched(operation(ChatCompletion, body=[ChatRequest])),
        ),
        ("/invocations", generations.invocation, without_model(either)),
        ("/v1/messages", generations.message, operation(Message, body=[MessagesRequest], streams=True)),
        ("/v1/messages/count_tokens", tokens.count_message, operation(MessageTokens, body=[PromptFields])),
        ("/v1/responses", generations.response, response),
        ("/v1/responses/input_tokens", tokens.count_response, operation(ResponseTokens, body=[ResponsesRequest])),
        ("/v1/select", generations.select, operation(Selection, body=[SelectText, SelectChat])),
        ("/generative_scoring", generations.score, operation(Scoring, body=[ScoringRequest])),
        ("/tokenize", tokens.tokenize, operation(TokenizedText, body=[TokenizeText, TokenizeChat])),
        ("/detokenize", tokens.detokenize, operation(DetokenizedText, body=[DetokenizeTokens])),
    ]
    for path, endpoint, described in routes:
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=described)
    path = "/v1/responses/{response_id}"
    _add_get(app, path, conversations.get, operation(ResponseObject))
    _add_get(app, f"{path}/input_items", conversations.input_items, operation(InputItems, queries=PAGE_QUERIES))
    deleted = operation(DeletedResponse)
    app.add_api_route(path, conversations.delete, methods=["DELETE"], response_model=None, openapi_extra=deleted)


def _add_get(app: FastAPI, path: str, endpoint: Any, described: dict[str, Any] | None = None) -> None:
    """`described`: None leaves the endpoint out of the description."""
    shown, is_shown = described or {}, described is not None
    app.add_api_route(
        path, endpoint, methods=["GET"], response_model=None, openapi_extra=shown, include_in_schema=is_shown
    )
    app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def _add_operations(app: FastAPI, models: ServedModels) -> None:
    operations, health, free = OperationRoutes(models), operation(Health), operation()
    routes: list[tuple[str, Any, dict[str, Any]]] = [
        ("/v1/models", operations.models, operation(Models)),
        ("/v1/models/{model_id:path}", operations.model, operation(Model)),
        ("/health", operations.health, health),
        ("/ping", operations.health, health),
        ("/ready", operations.ready, operation(Ready)),
        ("/version", operations.version, operation(Version)),
        ("/fleet", operations.fleet, free),
        ("/dashboard", operations.dashboard, operation(media_type="text/html")),
        ("/requests", operations.requests, operation(Requests, queries=[OF_SESSION])),
        ("/requests/{request_id:path}/timeline", operations.timeline, operation(Timelines)),
        ("/requests/{request_id:path}", operations.request, free),
    ]
    for path, endpoint, described in routes:
        _add_get(app, path, endpoint, described)
    several = operation(status="204", queries=[SESSIONS])
    for path, endpoint, described in (
        ("/sessions", operations.end_sessions, several),
        ("/sessions/{session}", operations.end_session, operation(status="204")),
    ):
        app.add_api_route(path, endpoint, methods=["DELETE"], response_model=None, openapi_extra=described)
    app.add_api_route("/ping", operations.health, methods=["POST"], response_model=None, openapi_extra=health)


def _add_api_page(app: FastAPI, model: str) -> None:
    page: list[bytes] = []  # made when it is first asked for, since making the schema takes some time

    async def docs() -> Response:
        if not page:
            page.append(await asyncio.to_thread(lambda: api_page(app.openapi(), model)))
        return Response(page[0], media_type="text/html", headers=PAGE_HEADERS)

    _add_get(app, "/docs", docs)


def _add_metrics(app: FastAPI, metrics_page: Callable[[], Page]) -> None:
    async def metrics() -> Response:
        page = metrics_page()
        return Response(page.body, page.status, media_type=page.content_type)

    _add_get(app, "/metrics", metrics, operation(media_type="text/plain"))


# -- the page /docs: endpoints and their fields, with a form that sends a request. Needs nothing from elsewhere --------


TEMPLATE = Path(__file__).parent / "api_page.html"
EXAMPLES = {
    "/v1/chat/completions": '{"model": "MODEL", "messages": [{"role": "user", "content": "What is an otter?"}]}',
    "/v1/completions": '{"model": "MODEL", "prompt": "An otter is", "max_tokens": 16}',
    "/v1/responses": '{"model": "MODEL", "input": "What is an otter?"}',
    "/v1/messages": (
        '{"model": "MODEL", "max_tokens": 64, "messages": [{"role": "user", "content": "What is an otter?"}]}'
    ),
    "/v1/select": '{"model": "MODEL", "prompt": "An otter is", "choices": [" a bird.", " a mammal."]}',
    "/generative_scoring": (
        '{"model": "MODEL", "query": "Is this a bird? ", "items": ["An otter."], "label_token_ids": [7, 8]}'
    ),
    "/tokenize": '{"model": "MODEL", "prompt": "An otter"}',
    "/detokenize": '{"model": "MODEL", "tokens": [7, 8]}',
}
"""Bodies to begin with, by path."""

_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
}


def api_page(schema: Mapping[str, Any], model: str) -> bytes:
    """The page for an OpenAPI schema. `model`: the name in the examples."""
    sections = []
    for path, methods in schema["paths"].items():
        for method, described in methods.items():
            sections.append(_section(path, method.upper(), described, model))
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("<!-- endpoints -->", "\n".join(sections)).encode()


def _section(path: str, method: str, described: Mapping[str, Any], model: str) -> str:
    about = escape((described.get("description") or "").split("\n")[0])
    example = EXAMPLES.get(path, "{}").replace("MODEL", json.dumps(model)[1:-1]) if method == "POST" else ""
    attributes = f'data-method="{method}" data-path="{escape(path, quote=True)}"'
    parts = [f"<details {attributes}><summary><b>{method}</b> <code>{escape(path)}</code> {about}</summary>"]
    if rows := dict(row for body in bodies(described) for row in _rows(body)):
        parts += ["<table><thead><tr><th>Field</th><th>Type</th><th>Bounds</th><th>Default</th></tr></thead><tbody>"]
        parts += [*rows.values(), "</tbody></table>"]
    if "{" in path:
        parts.append(f'<label>Path <input class="path" value="{escape(path, quote=True)}"></label>')
    if method == "POST":
        parts.append(f'<textarea rows="4" spellcheck="false">{escape(example)}</textarea>')
    parts.append("<button>Send</button><pre hidden></pre></details>")
    return "".join(parts)


def _rows(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A row for each field, by its name."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else escape(json.dumps(field["default"])) if "default" in field else ""
        cells = (f"<code>{escape(name)}</code>", escape(_type(field)), _bounds(field), default)
        yield name, f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _type(field: Mapping[str, Any]) -> str:
    """A short form of a field's type."""
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "enum" in field or "const" in field:
        return ", ".join(
            each if isinstance(each, str) else json.dumps(each) for each in field.get("enum", [field.get("const")])
        )
    for name in ("anyOf", "oneOf", "allOf"):
        if name in field:
            return " or ".join(dict.fromkeys(_type(each) for each in field[name] if not _is_nothing(each)))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {})) or 'anything'}"
    return str(field.get("type", ""))


def _is_nothing(field: Mapping[str, Any]) -> bool:
    """Whether it is a form of no value."""
    return field.get("type") == "null" or field.get("const") in (False, "") or field.get("maxItems") == 0


def _bounds(field: Mapping[str, Any]) -> str:
    """Of a number, or of the length of a text or list."""
    bounded = next((each for each in field.get("anyOf", [field]) if not _is_nothing(each)), field)
    found = {name: bounded[name] for name in _BOUNDS if bounded.get(name, LARGEST) != LARGEST}
    return ", ".join(_BOUNDS[name].format(bound) for name, bound in found.items())
