"""Reads request bodies of bounded size as JSON objects."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.http.pending_memory import BODY, BodyBytes

BODY_TIMEOUT_S = 60.0
"""Maximum time for a client to send its body."""

LINGER_S = 1.0
"""The rest of a refused body is read and dropped for this time, so that the client can read the answer."""

MAX_PARTS = 1 << 19
"""Arrays, objects and keys of a body, which take most of the time and memory of parsing. They are counted in texts too:
such a text would be many times longer than any context."""


class BodyRefused(ApiError):
    """The rest of the body is dropped, and the connection ends."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error.message,
            status=error.status,
            code=error.code,
            headers={**error.headers, "connection": "close"},
        )


class LingeringResponse(Response):
    """Answers at once and keeps the connection open for `LINGER_S`: a reset would overtake the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Returns the whole body. Raises 413 as soon as it exceeds the limit, 503 if it has no room, 408 if it is late, and
    ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyRefused(_too_large(limit_bytes))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _receive_body(request, limit_bytes)
    except TimeoutError:
        raise BodyRefused(ApiError("The request body took too long to arrive", status=408)) from None
    except ApiError as error:
        raise BodyRefused(error) from None


async def _receive_body(request: Request, limit_bytes: int) -> bytes:
    held: BodyBytes = request.scope["state"][BODY]
    parts: list[bytes] = []
    is_all = False
    while not is_all:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_all = message.get("body", b""), not message.get("more_body", False)
        held.grow(len(part))
        if held.num_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(f"The request body is larger than {limit_bytes} bytes", status=413, code="request_too_large")


async def read_json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """Returns the body as a JSON object. Raises 400 if it is none, and the errors of `read_body`.

    The body is parsed whole, and holds the event loop for as long (docs/sizing.md).
    """
    try:
        body = await read_body(request, limit_bytes)
    except ClientDisconnect as error:
        raise ApiError("The client went away before its request was complete") from error
    if len(body) > MAX_PARTS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_PARTS:
        raise ApiError(f"The body has more than {MAX_PARTS} arrays, objects and keys", code="invalid_json")
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(
                f"The request body comes as {encoding[:32]!r}; bodies are read as they are",
                status=415,
                code="unsupported_encoding",
            ) from error
        raise ApiError(f"The request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError("The request body must be a JSON object", code="invalid_json")
    return content
