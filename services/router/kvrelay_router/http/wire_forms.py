"""Forms of HTTP that uvicorn does not serve: offers of another protocol, and clients of HTTP/1.0."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def plain_head(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head without the offer to go on with another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
        if value and name not in (b"upgrade", b"http2-settings"):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


def without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """Serves a client of HTTP/1.0, which knows no chunks: an answer without a length ends with its connection."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve
