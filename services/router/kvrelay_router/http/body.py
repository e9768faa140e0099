"""Reading request bodies: bounded, and JSON only."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send its request."""

LINGER_S = 1.0
"""How long an oversized body is read on and dropped, so that the client gets to read the answer."""


class BodyTooLarge(ApiError):
    """413. The rest of the body is not kept, and the connection ends."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {limit_bytes} bytes",
            status=413,
            code="request_too_large",
            headers={"connection": "close"},
        )

    def response(self) -> Response:
        """The answer at once; then the connection lingers, or its reset would overtake the answer."""
        return _LingeringResponse(orjson.dumps(self.body()), 413, self.headers, media_type="application/json")


class _LingeringResponse(Response):
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
    """The whole body. Raises 413 as soon as it is known to be larger than the limit; 408; ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _receive_body(request, limit_bytes)
    except TimeoutError as error:
        raise ApiError(
            "The request body took too long to arrive", status=408, headers={"connection": "close"}
        ) from error


async def _receive_body(request: Request, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes, is_all = 0, False
    while not is_all:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece, is_all = message.get("body", b""), not message.get("more_body", False)
        num_bytes += len(piece)
        if num_bytes > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        pieces.append(piece)
    return b"".join(pieces)


async def read_json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as a JSON object, or 400."""
    writer: EventWriter | None = request.scope["state"].get(EVENT_WRITER)
    body = writer.whole_body() if writer is not None else None
    try:
        if body is None:
            body = await read_body(request, limit_bytes)
        elif len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
    except ClientDisconnect as error:
        raise ApiError("The client went away before its request was complete") from error
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
