"""The outermost middleware: names each request, checks its API key, and answers every exception."""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay_router.access.api_keys import KeyRing
from kvrelay_router.access.request_names import name_request
from kvrelay_router.http.anthropic_errors import error_response, is_anthropic
from kvrelay_router.http.event_writer import EVENT_WRITER
from kvrelay_router.openai.error_mapping import as_api_error
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, TIMINGS, RequestMetrics

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/dashboard"})
"""Probes, and the dashboard page, which holds no data. They need no key."""


class AuthMiddleware:
    """ASGI middleware. Sets `names` (`RequestNames`) and `TIMINGS` in the request's state."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], router_id: str, metrics: RequestMetrics) -> None:
        self._app = app
        self._router_header = (b"x-kvrelay-router", router_id.encode())
        self._metrics = metrics
        self._keys = KeyRing(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        timings = None
        if scope["path"] in OPERATION_BY_PATH:
            timings = self._metrics.begin(scope["path"], headers.get("traceparent", ""))
        names = name_request(headers, timings.context if timings is not None else None)
        state = scope.setdefault("state", {})
        state["names"] = names
        state[TIMINGS] = timings
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
            if scope["path"] not in OPEN_PATHS and (key := self._keys.check(headers)):
                state["names"] = msgspec.structs.replace(names, key=key)
            await self._app(scope, receive, send_named)
        except Exception as error:
            if started:
                raise
            await error_response(as_api_error(error), scope["path"])(scope, receive, send_named)
        finally:
            # The writer refers to the request, which refers to this state: without the cycle both are freed now.
            state.pop(EVENT_WRITER, None)
            if timings is not None:
                self._metrics.ended(timings, names.unique)
