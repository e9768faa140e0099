"""HTTP clients for many calls at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

_NUM_EACH = 16
_MAX_CLIENTS = 64


class Connections:
    """Divides calls among clients of few connections. httpx looks at all connections of a client whenever a call begins
    or ends: with 128 calls at once in one client, that is more than half of the CPU time of a program's process."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float) -> None:
        """`timeout_s` bounds the silence within a call."""
        self._headers = dict(headers)
        self._timeout = httpx.Timeout(timeout_s, connect=10)
        self._ssl = httpx.create_ssl_context()
        self._clients: list[httpx.AsyncClient] = []
        self._num_calls: list[int] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one call: the first that has room, so that connections of earlier calls are used again."""
        place = self._place()
        self._num_calls[place] += 1
        try:
            yield self._clients[place]
        finally:
            self._num_calls[place] -= 1

    def _place(self) -> int:
        for place, number in enumerate(self._num_calls):
            if number < _NUM_EACH:
                return place
        if len(self._clients) == _MAX_CLIENTS:
            return min(range(_MAX_CLIENTS), key=self._num_calls.__getitem__)
        limits = httpx.Limits(max_connections=_NUM_EACH, max_keepalive_connections=_NUM_EACH)
        self._clients.append(
            httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits, verify=self._ssl)
        )
        self._num_calls.append(0)
        return len(self._clients) - 1
