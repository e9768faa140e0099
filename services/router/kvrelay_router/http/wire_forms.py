"""Rewrites the head of a request that offers to go on with another protocol, which uvicorn does not serve."""

from __future__ import annotations


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
