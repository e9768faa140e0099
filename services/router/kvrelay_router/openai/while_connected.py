"""Planning that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.client_watch import ClientGone, ClientWatch
from kvrelay_router.openai.request_metrics import CLIENT_GONE
from kvrelay_router.pending_memory import BODY, BodyBytes

T = TypeVar("T")

WATCHED_BODY_BYTES = 64 << 10
"""The planning of a smaller body takes milliseconds; watching it would cost each request more than that saves."""


async def while_connected(http: Request, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the planning of a request whose body was read. If the body is large, `work` is cancelled when the client
    disconnects (ApiError) or after `timeout_s` (TimeoutError), so that no text is tokenized in vain."""
    body: BodyBytes = http.scope["state"][BODY]
    if body.num_bytes < WATCHED_BODY_BYTES:
        return await work
    try:
        async with asyncio.timeout(timeout_s):
            with ClientWatch(http.receive):
                return await work
    except ClientGone:
        raise ApiError("The client closed its connection", status=499, code=CLIENT_GONE) from None
