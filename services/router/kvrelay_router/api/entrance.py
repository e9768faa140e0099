"""The outermost application: generations take a short way, everything else goes through FastAPI.

FastAPI's own layers cost about as much as all else that a request needs before its first token, and each of them would
be passed by every event of a stream. What they would do for a generation is done by `Front` and by the endpoint itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay_router.api.front import Front
from kvrelay_router.api.observer import RequestObserver
from kvrelay_router.api.settings import ApiSettings

Endpoint = Callable[[Request], Awaitable[Response]]


class Entrance:
    """ASGI application. `endpoints`: those of POST requests, by path. They are routes of `app` too, for its schema."""

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], settings: ApiSettings, observer: RequestObserver
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._short_way = Front(
            self._serve, api_keys=settings.api_keys, router_id=settings.router_id, observer=observer
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        is_short = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints
        await (self._short_way if is_short else self._app)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoints[scope["path"]](Request(scope, receive))
        await response(scope, receive, send)
