"""Cancels the work for a request if its client disconnects or its time is over."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from kvrelay_router.http.event_writer import EventWriter


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class TaskTimeout:
    """`with TaskTimeout(timeout_s): ...` in a task is a cheaper `async with asyncio.timeout`."""

    __slots__ = ("_is_late", "_num_cancelled", "_task", "_timeout_s", "_timer")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_late = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancelled = task, task.cancelling()
        self._timer = task.get_loop().call_later(self._timeout_s, self._late)

    def _late(self) -> None:
        self._is_late = True
        self._task.cancel()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._is_late:
            return
        still_cancelled = self._task.uncancel() > self._num_cancelled
        if exc_type is asyncio.CancelledError and not still_cancelled:
            raise TimeoutError from error


class ClientWatch:
    """`with ClientWatch(receive, writer): ...` in a task cancels the block if the client disconnects.

    It works like `asyncio.timeout`, and raises ClientGone on exit. The request's body must have been read before. The
    connection reports its end to `writer`; if there is no writer, a task awaits `receive`.
    """

    def __init__(self, receive: Receive, writer: EventWriter | None) -> None:
        self._receive = receive
        self._writer = writer
        self._listener: asyncio.Task[None] | None = None
        self._gone = False

    def __enter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._writer is not None:
            self._writer.watch(self._client_gone)
        else:
            self._listener = asyncio.create_task(self._listen())
        return self

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone()

    def _client_gone(self) -> None:
        self._gone = True
        self._task.cancel()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.unwatch()
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # break the reference cycle, so that both are freed at once
        if not self._gone:
            return
        still_cancelled = self._task.uncancel()
        if exc_type is asyncio.CancelledError and still_cancelled == 0:
            raise ClientGone from error
