"""Puts the HTTP API together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvrelay.fleet.key_limits import OwnLimits, SharedLimits
from kvrelay_router.api.chat import ChatEndpoint
from kvrelay_router.api.completions import CompletionsEndpoint
from kvrelay_router.api.entrance import Endpoint, Entrance
from kvrelay_router.api.errors import ApiError, on_api_error, on_http_exception
from kvrelay_router.api.front import Front
from kvrelay_router.api.limits import Door
from kvrelay_router.api.observer import RequestObserver
from kvrelay_router.api.operations import OperationRoutes
from kvrelay_router.api.schema.chat import ChatRequest
from kvrelay_router.api.schema.completion import CompletionRequest
from kvrelay_router.api.schema.parsing import RequestModel
from kvrelay_router.api.service import ApiService, InProgress
from kvrelay_router.api.settings import ApiSettings
from kvrelay_router.api.tokens import DetokenizeTokens, TokenizeText, TokenRoutes
from kvrelay_router.dispatch.interface import Dispatcher
from kvrelay_router.text.service import TextService

SHOWN_HEADERS = (
    "x-request-id",
    "retry-after",
    "x-kvrelay-router",
    "x-kvrelay-prefill",
    "x-kvrelay-decode",
    "x-kvrelay-route",
)
"""Of answers to web pages of other origins, beside those that browsers show anyway."""


def create_app(
    settings: ApiSettings,
    dispatcher: Dispatcher,
    text: TextService,
    limits: SharedLimits | OwnLimits | None = None,
    observer: RequestObserver | None = None,
) -> ASGIApp:
    """The ASGI application. It owns none of dispatcher, text service and limits: closing them is the caller's."""
    door = Door(settings.key_rules, settings.own_key_rules, limits)
    service = ApiService(settings, dispatcher, text, InProgress(settings.max_requests), door)
    app = FastAPI(title="kvrelay", redirect_slashes=False)
    observer = observer or RequestObserver(settings.model_name)
    app.add_middleware(Front, api_keys=settings.api_keys, router_id=settings.router_id, observer=observer)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    endpoints: dict[str, Endpoint] = {
        "/v1/completions": CompletionsEndpoint(service).serve,
        "/v1/chat/completions": ChatEndpoint(service).serve,
    }
    _add_generation(app, service, endpoints)
    _add_operations(app, service)
    entrance = Entrance(app, endpoints, settings, observer)
    return _for_web_pages(entrance, settings.allowed_origins) if settings.allowed_origins else entrance


def _for_web_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Browsers ask, without a key, whether a page of another origin may use the API, and what of answers it may see."""
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=SHOWN_HEADERS
    )


def _add_generation(app: FastAPI, service: ApiService, endpoints: Mapping[str, Endpoint]) -> None:
    tokens = TokenRoutes(service)
    routes: list[tuple[str, Any, type[RequestModel]]] = [
        ("/v1/completions", endpoints["/v1/completions"], CompletionRequest),
        ("/v1/chat/completions", endpoints["/v1/chat/completions"], ChatRequest),
        ("/tokenize", tokens.tokenize, TokenizeText),
        ("/detokenize", tokens.detokenize, DetokenizeTokens),
    ]
    for path, endpoint, model in routes:
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=_body_schema(model))


def _add_operations(app: FastAPI, service: ApiService) -> None:
    operations = OperationRoutes(service)
    routes: list[tuple[str, Any]] = [
        ("/v1/models", operations.models),
        ("/v1/models/{model_id:path}", operations.model),
        ("/health", operations.health),
        ("/ping", operations.health),
        ("/ready", operations.ready),
        ("/version", operations.version),
        ("/fleet", operations.fleet),
        ("/dashboard", operations.dashboard),
        ("/requests", operations.requests),
        ("/requests/{request_id:path}/timeline", operations.timeline),
        ("/requests/{request_id:path}", operations.request),
    ]
    for path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_api_route("/ping", operations.health, methods=["POST"], response_model=None)


def _body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """Bodies are read by the routes themselves, so the documentation is told their schema."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
