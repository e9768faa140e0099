"""Cancels the work for a request if its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.http.pending_memory import BODY, BodyBytes

T = TypeVar("T")

CLIENT_GONE = "client_gone"
"""The code of a request whose client closed its connection."""
WATCHED_BODY_BYTES = 64 << 10
"""The planning of a smaller body takes milliseconds; watching it would cost each request more than that saves."""


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class ClientWatch:
    """`with ClientWatch(receive): ...` in a task cancels the block if the client disconnects.

    It works like `asyncio.timeout`, and raises ClientGone on exit. The request's body must have been read before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    def __enter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener: asyncio.Task[None] | None = asyncio.create_task(self._listen())
        return self

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    def stop(self) -> None:
        """From now on the client may go, as it does when its answer is complete."""
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # break the reference cycle, so that both are freed at once

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if not self._gone:
            return
        still_cancelled = self._task.uncancel()
        if exc_type is asyncio.CancelledError and still_cancelled == 0:
            raise ClientGone from error


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
