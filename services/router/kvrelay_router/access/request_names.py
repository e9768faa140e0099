"""The ids of a request, and what its headers say of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import msgspec

from kvrelay.telemetry.trace_context import TraceContext

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


def name_request(headers: Mapping[str, str], trace: TraceContext | None = None) -> RequestNames:
    """Takes the client's names over where they are sane, and makes the others."""
    own = headers.get("x-request-id", "")
    generated = secrets.token_hex(16)
    session = headers.get("x-kvrelay-session", "")
    session = session if SANE_REQUEST_ID.fullmatch(session) else ""
    is_own = SANE_REQUEST_ID.fullmatch(own) is not None
    return RequestNames(
        public=own if is_own else generated,
        unique=f"{own}-{generated[:12]}" if is_own else generated,
        trace=str(trace) if trace is not None else "",
        timeout=headers.get("x-request-timeout", ""),
        session=session,
    )
