"""The outermost layer of the app: names the request, checks the key, and lets no exception out."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay_router.api.errors import ApiError, as_api_error
from kvrelay_router.api.observer import OPERATIONS, Course, RequestObserver

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/dashboard"})
"""Probes and a page without data, which need no key."""

SANE_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestNames(msgspec.Struct, frozen=True):
    """What a request is called.

    `public` is the client's own id, if it sent a sane one, and goes into `x-request-id`. Clients repeat their ids
    (retries do), so dispatch and workers see `unique`. `trace` is the W3C traceparent of the request's own span; empty
    for what is no generation.
    """

    public: str
    unique: str
    trace: str
    key: str = ""  # the API key, where keys are set
    timeout: str = ""  # `x-request-timeout` as it was sent
    session: str = ""  # from `x-kvrelay-session`: what `sticky` routing keeps on one worker


def name_request(headers: Mapping[str, str], course: Course | None = None) -> RequestNames:
    """Takes the client's names over where they are sane, and makes the others."""
    own = headers.get("x-request-id", "")
    generated = secrets.token_hex(16)
    session = headers.get("x-kvrelay-session", "")
    session = session if SANE_REQUEST_ID.fullmatch(session) else ""
    is_own = SANE_REQUEST_ID.fullmatch(own) is not None
    return RequestNames(
        public=own if is_own else generated,
        unique=f"{own}-{generated[:12]}" if is_own else generated,
        trace=str(course.context) if course is not None else "",
        timeout=headers.get("x-request-timeout", ""),
        session=session,
    )


class KeyRing:
    """The accepted API keys. Digests are compared, so neither content nor length of a key shows in the time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str]) -> str:
        """The request's key; empty where none are set. Raises 401 unless it is one of them."""
        if not self._digests:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("You didn't provide an API key (Authorization: Bearer KEY)", None)
        digest = hashlib.sha256(key.strip().encode()).digest()
        accepted = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(accepted):
            raise _unauthorized("Incorrect API key provided", "invalid_api_key")
        return key.strip()


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"www-authenticate": "Bearer"})


COURSE = "course"
"""In a request's state: what is noted of a generation; None of anything else."""


class Front:
    """ASGI middleware. Puts `RequestNames` into the request's state as `names`."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], router_id: str, observer: RequestObserver) -> None:
        self._app = app
        self._router_header = (b"x-kvrelay-router", router_id.encode())
        self._observer = observer
        self._keys = KeyRing(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        course = None
        if scope["path"] in OPERATIONS:
            course = self._observer.begin(scope["path"], headers.get("traceparent", ""))
        names = name_request(headers, course)
        state = scope.setdefault("state", {})
        state["names"] = names
        state[COURSE] = course
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = ((b"x-request-id", names.public.encode()), self._router_header)
                message["headers"] = [*message.get("headers", ()), *own]
                if course is not None:
                    course.status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and (key := self._keys.check(headers)):
                state["names"] = msgspec.structs.replace(names, key=key)
            await self._app(scope, receive, send_named)
        except Exception as error:
            api_error = as_api_error(error)
            if started:
                raise
            await api_error.response()(scope, receive, send_named)
        finally:
            if course is not None:
                self._observer.ended(course, names.unique)
