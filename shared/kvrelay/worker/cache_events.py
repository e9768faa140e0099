"""Brings what the cache says of itself to the prefix index."""

from __future__ import annotations

import asyncio

from kvrelay.fleet.index import IndexPublisher
from kvrelay.kv.cache import Cache


class CacheEvents:
    """Empties the cache's list of events at an interval, on the event loop; the publisher's thread does the rest."""

    def __init__(self, cache: Cache, publisher: IndexPublisher, interval_s: float) -> None:
        self._cache = cache
        self._publisher = publisher
        self._interval_s = interval_s

    async def run(self) -> None:
        """Until cancelled."""
        self._publisher.start()
        while True:
            self._publisher.publish(self._cache.drain_events())
            await asyncio.sleep(self._interval_s)

    async def close(self) -> None:
        """Withdraws this worker's blocks, if Redis answers."""
        await asyncio.to_thread(self._publisher.close)

    def totals(self) -> dict[str, float]:
        """For the worker's status."""
        return self._publisher.report()
