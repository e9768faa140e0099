"""Reads a request's deltas in a task, batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.running_request import RunningRequest


class Waker:
    """A `DeltaSink` that is never ready."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def can_take(self) -> bool:
        return False

    def take(self, deltas: list[SequenceDelta]) -> None:
        raise AssertionError("the sink is not ready")

    def wake(self) -> None:
        self.news.set()


async def read_batches(handle: RunningRequest) -> AsyncGenerator[list[SequenceDelta], None]:
    """All deltas until every sequence has finished. Raises the request's error after the deltas before it.

    A reader that leaves early cancels the request.
    """
    waker = Waker()
    handle.connect(waker)
    try:
        while True:
            if handle.has_deltas:
                yield handle.take()
            elif handle.error is not None:
                raise handle.error
            elif handle.is_over:
                return
            else:
                waker.news.clear()
                await waker.news.wait()
    finally:
        handle.disconnect()
        handle.cancel()
