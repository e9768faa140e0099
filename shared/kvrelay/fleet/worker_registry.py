"""Registers workers in numbered Redis slots, under leases that carry their incarnation.

States of a lease: FREE > HELD (join) > HELD (renew) > FREE (leave, or not renewed in time). A slot held by another
incarnation is never taken, except from an incarnation of the same worker of which the caller knows that it has ended. A
worker that lost its slot learns it from its next renewal.

Redis is advisory: callers must continue when a method raises RegistryUnavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from contextlib import suppress
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from redis.exceptions import RedisError

from kvrelay.fleet.connect import REDIS_AWAY, REDIS_FAILED, connect_async
from kvrelay.fleet.worker_record import NO_SLOT, WorkerRecord, decode_record, encode_record

log = logging.getLogger(__name__)

MAX_SLOTS = 1024
SOCKET_TIMEOUT_S = 1.0
OLDEST_REDIS = (6, 2)

T = TypeVar("T")


class RegistryError(Exception):
    """Base class of this module's errors."""


class RegistryUnavailable(RegistryError):
    """Redis is unreachable or too slow. Continue without it and retry later."""


class RegistryMisconfigured(RegistryError):
    """Redis answers but cannot be used: it is too old or evicts keys."""


class LeaseLost(RegistryError):
    """Another incarnation holds the slot, or a later incarnation of this worker joined. Join again or end."""


class FleetFull(RegistryError):
    """All slots of this model are taken."""


class WorkerIdTaken(RegistryError):
    """Another incarnation with this worker's id holds a lease.

    `expires_at_ms`: end of the lease by Redis' clock; each renewal makes it later. `record`: None before its first
    renewal, or if a newer version wrote it.
    """

    def __init__(self, worker_id: str, incarnation: str, expires_at_ms: int, record: WorkerRecord | None) -> None:
        super().__init__(f"worker id {worker_id} is taken by incarnation {incarnation}")
        self.incarnation = incarnation
        self.expires_at_ms = expires_at_ms
        self.record = record


class Registry:
    """Workers of all models under one prefix. Use it on one event loop; no call takes more than a few seconds."""

    def __init__(self, redis_url: str, prefix: str = "kvrelay", *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._prefix = prefix
        self._redis = connect_async(redis_url, timeout_s=socket_timeout_s)
        self._join = self._script("join")
        self._renew = self._script("renew")
        self._leave = self._script("leave")
        self._list = self._script("list")
        self._drain = self._script("drain")

    async def check_server(self) -> None:
        """Checks version and settings. Raises RegistryMisconfigured with the change to make."""
        answer: dict[str, Any] = await self._call(self._redis.info())
        by_node = [answer] if "redis_version" in answer else list(answer.values())  # a Cluster answers by node name
        for info in by_node:
            self._check_node(info)

    @staticmethod
    def _check_node(info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            raise RegistryMisconfigured(f"Redis {version} is too old: 6.2 or newer is needed")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy == "noeviction":
            return
        advice = (
            f"Redis has maxmemory-policy {policy}; set it to noeviction, or leases and the prefix index vanish when "
            f"memory is short"
        )
        if int(info.get("maxmemory", 0)):
            raise RegistryMisconfigured(advice)
        log.warning(advice)

    async def join(self, record: WorkerRecord, ttl_s: float, *, ended: str = "") -> WorkerRecord:
        """Takes the smallest free slot for `ttl_s` seconds; returns the record with it.

        `ended`: an earlier incarnation of this worker whose process has ended; it loses its lease.
        Raises WorkerIdTaken, FleetFull, LeaseLost, RegistryUnavailable.
        """
        arguments = [record.worker_id, record.incarnation, int(ttl_s * 1000), MAX_SLOTS, ended]
        slot, *holder = await self._call(self._join(keys=self._keys(record.model), args=arguments))
        if holder:
            incarnation, expires_at_ms, data = holder
            raise WorkerIdTaken(record.worker_id, incarnation.decode(), int(expires_at_ms), _readable(data))
        if slot < 0:
            raise FleetFull(f"all {MAX_SLOTS} slots of model {record.model} are taken")
        joined = msgspec.structs.replace(record, slot=slot)
        await self.renew(joined, ttl_s)
        return joined

    async def renew(self, record: WorkerRecord, ttl_s: float) -> None:
        """Extends the lease to `ttl_s` seconds from now and publishes the record, even if Redis lost its data.

        Raises LeaseLost, RegistryUnavailable, ValueError for a record that never joined.
        """
        if record.slot == NO_SLOT:
            raise ValueError(f"worker {record.worker_id} has not joined")
        arguments = [record.worker_id, record.incarnation, encode_record(record), int(ttl_s * 1000), record.slot]
        holder: bytes = await self._call(self._renew(keys=self._keys(record.model), args=arguments))
        if holder:
            raise LeaseLost(
                f"slot {record.slot} of worker {record.worker_id} is lost to incarnation {holder.decode()} "
                f"(own: {record.incarnation})"
            )

    async def leave(self, record: WorkerRecord) -> bool:
        """Frees the slot; False if it was already lost. Raises RegistryUnavailable."""
        arguments = [record.incarnation, record.slot]
        return bool(await self._call(self._leave(keys=self._keys(record.model), args=arguments)))

    async def list_workers(self, model: str) -> list[WorkerRecord]:
        """Workers of a model with valid leases, by slot, in one round trip. Raises RegistryUnavailable.

        An unreadable record (of a newer version) is skipped with a warning.
        """
        workers = []
        answer = await self._call(self._list(keys=[*self._keys(model), self._drains(model)]))
        for data, shall_drain in zip(answer[::2], answer[1::2], strict=True):
            try:
                record = decode_record(data)
                workers.append(msgspec.structs.replace(record, draining=True) if shall_drain else record)
            except msgspec.DecodeError as error:
                log.warning("registry: skipped a worker record that cannot be read: %s", error)
        return sorted(workers, key=lambda worker: worker.slot)

    async def mark_draining(self, model: str, worker_id: str, *, draining: bool) -> bool:
        """Sets or removes the mark that stops routers from using this incarnation; False if it is not registered.

        Raises RegistryUnavailable.
        """
        keys = [self._keys(model)[0], self._drains(model)]
        return bool(await self._call(self._drain(keys=keys, args=[worker_id, "1" if draining else "0"])))

    async def close(self) -> None:
        """Closes the connections. Leases remain until they expire."""
        with suppress(*REDIS_FAILED):
            await self._redis.aclose()

    def _drains(self, model: str) -> str:
        return f"{self._keys(model)[0].removesuffix(':leases')}:drains"

    def _keys(self, model: str) -> list[str]:
        """Redis keys of a model. They share a hash tag, so a Cluster stores them on one node."""
        tag = f"{self._prefix}:{{{quote(model, safe='/')}}}"
        return [f"{tag}:leases", f"{tag}:records"]

    def _script(self, name: str) -> Any:
        """A script that is run by digest and reloaded if the server does not know it."""
        source = resources.files("kvrelay.fleet").joinpath(f"{name}.lua").read_text(encoding="utf-8")
        return self._redis.register_script(source)

    async def _call(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except REDIS_AWAY as error:
            raise RegistryUnavailable(f"Redis does not answer: {error}") from error
        except RedisError as error:
            raise RegistryError(f"Redis refused: {error}") from error


def _readable(data: bytes) -> WorkerRecord | None:
    try:
        return decode_record(data)
    except msgspec.DecodeError:
        return None
