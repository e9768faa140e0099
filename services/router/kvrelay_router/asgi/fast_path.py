"""Serves generations without FastAPI's layers, and passes all other requests to the FastAPI application.

FastAPI's layers cost about as much as everything else that a request needs before its first token, and every event of
a stream would pass through them. The middleware outside and the endpoints do what these layers would do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class FastPathRouter:
    """ASGI application. Calls the endpoint of a POST request whose path is in `endpoints`; else it calls `app`."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
