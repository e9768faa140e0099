"""Sends the cache's events to the prefix index."""

from __future__ import annotations

import asyncio

from kvrelay.fleet.index import IndexPublisher
from kvrelay.kv.cache import Cache

INTERVAL_S = 0.05
"""Seconds between batches of events. A shorter interval makes more calls to Redis and finds hardly more prefixes: a
prompt takes longer to compute."""


class CacheEvents:
    """Drains the cache's events at an interval on the event loop. The publisher's thread sends them."""

    def __init__(self, cache: Cache, publisher: IndexPublisher) -> None:
        self._cache = cache
        self._publisher = publisher

    async def run(self) -> None:
        """Runs until cancelled."""
        self._publisher.start()
        while True:
            self._publisher.publish(self._cache.drain_events())
            await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Removes this worker's blocks from the index if Redis answers."""
        await asyncio.to_thread(self._publisher.close)

    def totals(self) -> dict[str, float]:
        """Counters for the worker's status."""
        return self._publisher.report()
