"""The outermost layer of the application, and its fast path past FastAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay_router.access.identity import name_request
from kvrelay_router.access.key_ring import KeyRing
from kvrelay_router.http.body import BODY, BodyBytes, PendingMemory
from kvrelay_router.http.error_response import error_response, is_anthropic
from kvrelay_router.openai.delivery import as_api_error
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, TIMINGS, RequestMetrics

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/dashboard"})
"""Probes, and the dashboard page, which holds no data. They need no key."""

Endpoint = Callable[[Request], Awaitable[Response]]


class AuthMiddleware:
    """ASGI middleware: names each request, checks its API key, and answers every exception.

    Sets `names` (`RequestNames`), `TIMINGS` and `BODY` in the request's state. Calls the endpoint of a POST request
    whose path is in `endpoints`, and `app` for all others: FastAPI's layers cost about as much as everything else that
    a request needs before its first token, and every event of a stream would pass through them. All see paths without
    `root_path`, whether a proxy has removed it or not.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        *,
        keys: KeyRing,
        router_id: str,
        root_path: str,
        metrics: RequestMetrics,
        memory: PendingMemory,
    ) -> None:
        self._app, self._endpoints = app, endpoints
        self._root_path = root_path
        self._router_header = (b"x-kvrelay-router", router_id.encode())
        self._metrics, self._memory = metrics, memory
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        if scope["http_version"] == "1.0":
            send = _in_one_piece(send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        timings = None
        if scope["path"] in OPERATION_BY_PATH:
            timings = self._metrics.begin(scope["path"], headers.get("traceparent", ""))
        names = name_request(headers, timings.context if timings is not None else None)
        body = BodyBytes(self._memory)
        state = scope.setdefault("state", {})
        state |= {"names": names, TIMINGS: timings, BODY: body}
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = [(b"x-request-id", names.public.encode()), self._router_header]
                if is_anthropic(scope["path"]):
                    own.append((b"request-id", names.public.encode()))
                message["headers"] = [*message.get("headers", ()), *own]
                if timings is not None:
                    timings.status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                state["names"] = msgspec.structs.replace(names, caller=self._keys.check(headers))
            endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
            if endpoint is None:
                await self._app(scope, receive, send_named)
            else:
                response = await endpoint(Request(scope, receive))
                await response(scope, receive, send_named)
        except Exception as error:
            if started:
                raise
            await error_response(as_api_error(error), scope["path"])(scope, receive, send_named)
        finally:
            body.release()
            if timings is not None:
                self._metrics.ended(timings, state["names"])


def _in_one_piece(send: Send) -> Send:
    """For a client of HTTP/1.0, which knows no chunks: the answer goes out at its end, with its length."""
    start: Message = {}
    parts: list[bytes] = []

    async def collect(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(parts)
        others = [each for each in start["headers"] if each[0] != b"content-length"]
        await send({**start, "headers": [*others, (b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    return collect
