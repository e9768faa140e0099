"""A worker in Redis: its registration (join, renew, leave), and its cache in the prefix index. The worker serves on
while Redis is away.

Two running processes may not have one worker id: the one that finds the id in use ends. An id is in use if its holder's
process runs on this machine, or its lease was renewed while this worker waited. The lease of a process that has ended
is taken over at once if that can be seen from here, otherwise when it has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from kvrelay.fleet.index import IndexPublisher
from kvrelay.fleet.worker_registry import (
    NO_SLOT,
    LeaseLost,
    Registry,
    RegistryError,
    RegistryMisconfigured,
    RegistryUnavailable,
    WorkerIdTaken,
    WorkerRecord,
)
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.process import ServiceEnds, StartFailed
from kvrelay.process_identity import can_be_seen, has_ended

log = logging.getLogger(__name__)

ID_POLL_S = 0.2
"""Interval of attempts to join while the lease of another incarnation has not expired."""
EVENTS_INTERVAL_S = 0.05
"""Seconds between batches of events. A shorter interval makes more calls to Redis and finds hardly more prefixes: a
prompt takes longer to compute."""


class WorkerIdInUse(Exception):
    """Another running process has this worker's id."""


class Membership:
    """Keeps a worker's record in the registry alive. `load` is called before each renewal. `registry`: None without
    Redis; then routers find the worker by its HTTP page."""

    def __init__(
        self,
        registry: Registry | None,
        record: WorkerRecord,
        load: Callable[[], dict[str, float]],
        *,
        ttl_s: float,
        interval_s: float,
    ) -> None:
        self._registry = registry
        self._record = record
        self._load = load
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._joined = asyncio.Event()
        self._changed = asyncio.Event()
        self._stopped = False
        self._ended = ""  # an incarnation of this worker whose process has ended
        self._holder: tuple[str, int] | None = None  # incarnation that has the id, and the end of its lease

    @property
    def joined(self) -> asyncio.Event:
        """Set once the worker has joined for the first time."""
        return self._joined

    async def run(self) -> None:
        """Joins and renews until `stop`.

        Raises StartFailed or ServiceEnds if Redis cannot be used or another process has this worker's id.
        """
        try:
            if self._registry is None:
                self._joined.set()
                while not self._stopped:
                    await self._changed.wait()
                    self._changed.clear()
            else:
                await self._run(self._registry)
        except (RegistryMisconfigured, WorkerIdInUse) as error:
            raise (ServiceEnds if self._joined.is_set() else StartFailed)(str(error)) from error

    async def _run(self, registry: Registry) -> None:
        available = True
        while not self._stopped:
            try:
                await self._once(registry)
                if not available:
                    log.info("the registry is back")
                available = True
            except RegistryMisconfigured:
                raise
            except WorkerIdTaken as taken:
                await self._wait_for_id(taken)
                continue
            except LeaseLost as error:
                log.warning("%s; joining again", error)
                self._record = msgspec.structs.replace(self._record, slot=NO_SLOT)
                continue
            except RegistryUnavailable as error:
                if available:
                    log.warning("the registry is away, serving goes on: %s", error)
                available = False
            except RegistryError as error:
                log.warning("%s", error)
            await self._pause(self._interval_s)

    def stop(self) -> None:
        """Ends `run`. It sets a flag because a library in between might swallow a cancellation."""
        self._stopped = True
        self._changed.set()

    async def announce(self, *, draining: bool) -> None:
        self._record = msgspec.structs.replace(self._record, draining=draining)
        self._changed.set()

    async def leave(self) -> None:
        if self._registry is None:
            return
        try:
            await self._registry.leave(self._record)
        except RegistryError as error:
            log.warning("could not leave the registry: %s", error)
        await self._registry.close()

    async def _once(self, registry: Registry) -> None:
        self._record = msgspec.structs.replace(self._record, load=self._load())
        if self._record.slot < 0:
            await registry.check_server()
            self._record = await registry.join(self._record, self._ttl_s, ended=self._ended)
            log.info("joined the fleet of %s in slot %d", self._record.model, self._record.slot)
            self._joined.set()
        else:
            await registry.renew(self._record, self._ttl_s)

    async def _wait_for_id(self, taken: WorkerIdTaken) -> None:
        """Returns when another attempt to join may succeed. Raises WorkerIdInUse."""
        process = taken.record.process if taken.record is not None else ""
        if has_ended(process):
            self._ended = taken.incarnation
            return
        seen, self._holder = self._holder, (taken.incarnation, taken.expires_at_ms)
        is_leaving = taken.record is not None and taken.record.draining
        # Redis may show an earlier expiry than before: after a failover to a replica that lagged behind.
        was_renewed = seen is not None and seen[0] == taken.incarnation and taken.expires_at_ms > seen[1]
        if (was_renewed or can_be_seen(process)) and not is_leaving:
            raise WorkerIdInUse(_in_use(self._record, taken))
        if seen is None or seen[0] != taken.incarnation:
            log.info("%s; waiting until it leaves or its lease expires", taken)
        await self._pause(ID_POLL_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()


def _in_use(mine: WorkerRecord, taken: WorkerIdTaken) -> str:
    where = f" at {taken.record.address}" if taken.record is not None else ""
    return (
        f"worker id {mine.worker_id} is in use by another running worker of model {mine.model}{where} (incarnation "
        f"{taken.incarnation}): give each worker its own --worker-id, and each fleet its own --redis-prefix"
    )


class CacheEvents:
    """Drains the cache's events for the prefix index at an interval on the event loop. The publisher's thread sends
    them."""

    def __init__(self, cache: PrefixCache, publisher: IndexPublisher) -> None:
        self._cache = cache
        self._publisher = publisher

    async def run(self, joined: asyncio.Event) -> None:
        """Runs until cancelled, once the worker has joined: a second process with its id, which never joins, must not
        replace the entries of the first."""
        await joined.wait()
        self._publisher.start()
        while True:
            self._publisher.publish(self._cache.drain_events())
            await asyncio.sleep(EVENTS_INTERVAL_S)

    async def close(self) -> None:
        """Removes this worker's blocks from the index if Redis answers."""
        await asyncio.to_thread(self._publisher.close)

    def totals(self) -> dict[str, float]:
        """Counters for the worker's status."""
        return self._publisher.report()
