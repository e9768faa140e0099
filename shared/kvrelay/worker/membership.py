"""A worker's registration in Redis: join, renew, leave. The worker serves on while Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from kvrelay.fleet.worker_record import NO_SLOT, WorkerRecord
from kvrelay.fleet.worker_registry import LeaseLost, Registry, RegistryError, RegistryMisconfigured, RegistryUnavailable

log = logging.getLogger(__name__)


class NoMembership:
    """Replaces `Membership` in a worker without Redis. Routers find such a worker by its HTTP page."""

    def __init__(self) -> None:
        self._joined = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def joined(self) -> asyncio.Event:
        return self._joined

    async def run(self) -> None:
        """Waits until `stop`."""
        self._joined.set()
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    async def announce(self, *, draining: bool) -> None: ...

    async def leave(self) -> None: ...


class Membership:
    """Keeps a worker's record in the registry alive. `load` is called before each renewal."""

    def __init__(
        self,
        registry: Registry,
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

    @property
    def joined(self) -> asyncio.Event:
        """Set once the worker has joined for the first time."""
        return self._joined

    async def run(self) -> None:
        """Joins and renews until `stop`. Raises RegistryMisconfigured, which a retry cannot fix."""
        available = True
        while not self._stopped:
            try:
                await self._once()
                if not available:
                    log.info("the registry is back")
                available = True
            except RegistryMisconfigured:
                raise
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
            await self._pause()

    def stop(self) -> None:
        """Ends `run`. It sets a flag because a library in between might swallow a cancellation."""
        self._stopped = True
        self._changed.set()

    async def announce(self, *, draining: bool) -> None:
        self._record = msgspec.structs.replace(self._record, draining=draining)
        self._changed.set()

    async def leave(self) -> None:
        try:
            await self._registry.leave(self._record)
        except RegistryError as error:
            log.warning("could not leave the registry: %s", error)
        await self._registry.close()

    async def _once(self) -> None:
        self._record = msgspec.structs.replace(self._record, load=self._load())
        if self._record.slot < 0:
            await self._registry.check_server()
            self._record = await self._registry.join(self._record, self._ttl_s)
            log.info("joined the fleet of %s in slot %d", self._record.model, self._record.slot)
            self._joined.set()
        else:
            await self._registry.renew(self._record, self._ttl_s)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
        self._changed.clear()
