"""The ids of a request, and other values from its headers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import msgspec

from kvrelay.telemetry.trace_context import TraceContext

VALID_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestNames(msgspec.Struct, frozen=True):
    """The ids of a request.

    `public` is the client's own id if it sent a valid one, and is returned as `x-request-id`. Clients repeat their ids,
    for example in retries, so dispatch and workers see `unique`. `trace` is the W3C traceparent of the request's own
    span; it is empty if the request is no generation.
    """

    public: str
    unique: str
    trace: str
    key: str = ""  # the API key; empty if none are configured
    timeout: str = ""  # the value of `x-request-timeout`
    session: str = ""  # the value of `x-kvrelay-session`, not checked


def name_request(headers: Mapping[str, str], trace: TraceContext | None = None) -> RequestNames:
    """Uses the client's own values if they are valid, and generates the others."""
    own = headers.get("x-request-id", "")
    generated = secrets.token_hex(16)
    is_own = VALID_REQUEST_ID.fullmatch(own) is not None
    return RequestNames(
        public=own if is_own else generated,
        unique=f"{own}-{generated[:12]}" if is_own else generated,
        trace=str(trace) if trace is not None else "",
        timeout=headers.get("x-request-timeout", ""),
        session=headers.get("x-kvrelay-session", ""),
    )
