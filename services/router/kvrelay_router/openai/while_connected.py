"""Planning that ends with its client."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.client_watch import ClientGone, ClientWatch, TaskTimeout
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter
from kvrelay_router.openai.error_mapping import as_api_error
from kvrelay_router.openai.request_metrics import CLIENT_GONE

T = TypeVar("T")

WATCHED_BODY_BYTES = 64 << 10
"""The planning of a smaller body takes milliseconds; watching it would cost each request more than that saves."""


async def while_connected(http: Request, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the planning of a request whose body was read. If the body is large, `work` is cancelled when the client
    disconnects or after `timeout_s`, so that no text is tokenized in vain. Raises ApiError for both."""
    writer: EventWriter | None = http.scope["state"].get(EVENT_WRITER)
    if writer is None or writer.body.num_bytes < WATCHED_BODY_BYTES:
        return await work
    try:
        with TaskTimeout(timeout_s), ClientWatch(http.receive, writer):
            return await work
    except ClientGone:
        raise ApiError("The client closed its connection", status=499, code=CLIENT_GONE) from None
    except TimeoutError as error:
        raise as_api_error(error) from None
