"""Aborts connections whose clients no longer read."""

from __future__ import annotations

import asyncio

UNREAD_S = 600.0
"""A client that reads nothing of a full buffer, or of the rest before a close, for this time loses its connection. No
deadline of a request bounds this."""


class ReaderWatch:
    """Aborts a connection whose write buffer has not shrunk within `UNREAD_S`, between `start` and `stop`."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """Nothing is written from now on, so the buffer shrinks if the client reads anything."""
        self.stop()
        num_unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(UNREAD_S, self._check, num_unread)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, num_unread: int) -> None:
        if self._transport.get_write_buffer_size() < num_unread:
            self.start()
        else:
            self._transport.abort()
