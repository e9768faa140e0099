"""Ends the work for a client that goes away."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class ClientWatch:
    """`async with ClientWatch(receive): ...` cancels what runs inside when the client disconnects.

    Like `asyncio.timeout`, with the connection's end in place of a deadline; raises ClientGone on exit. The request's
    body must have been read before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener = asyncio.create_task(self._listen())
        return self

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.cancel()
        del self._listener  # its end keeps this watch: without a cycle both go at once
        if not self._gone:
            return
        still_cancelled = self._task.uncancel()
        if exc_type is asyncio.CancelledError and still_cancelled == 0:
            raise ClientGone from error
