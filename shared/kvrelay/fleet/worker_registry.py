"""The records that workers publish about themselves, in numbered Redis slots under leases of their incarnations.

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
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from redis.exceptions import RedisError

from kvrelay.fleet.connect import REDIS_AWAY, REDIS_FAILED, connect_async

log = logging.getLogger(__name__)

MAX_SLOTS = 1024
SOCKET_TIMEOUT_S = 1.0
OLDEST_REDIS = (6, 2)
RECORD_PAGE = "/worker"
"""Path of the record as JSON on a worker's page server."""

NO_SLOT = -1
"""`slot` of a record that has not joined."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incarnation of a worker. `block_size` and `max_model_len` are in tokens.

    Change it with `msgspec.structs.replace`.
    """

    worker_id: str
    role: Literal["prefill", "decode"]
    incarnation: str
    address: str
    """Address for control messages, `tcp://host:port`, as `kvrelay.curve` advertises it."""
    model: str
    """Model name for clients."""
    fingerprint: str
    """Hash of weights, types, KV layout, block size and tokenizer. Only workers with equal fingerprints are paired."""
    protocol_version: int
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_running: int = 0
    """Maximum running sequences."""
    jump_forward: bool = False
    """Whether tokens that a grammar forces are appended without being sampled."""
    slot: int = NO_SLOT
    draining: bool = False
    load: dict[str, float] = {}
    block_bytes: int = 0
    """Bytes of a block with all layers."""
    group: str = ""
    """Id of rank 0 of its group with data-parallel attention; empty: it is in none."""
    token_budget: int = 0
    """Maximum tokens of a step."""
    numerics: str = ""
    """Equal for workers that round alike, see `ModelSpec`. Routers prefer such workers for one request."""
    device: str = ""
    """For display: cpu, or the GPU's name and UUID; empty: simulated."""
    kv_dtype: str = ""
    """For display: element type of KV; empty: simulated."""
    tokenizer: str = ""
    """See `kvrelay.model_directory`; empty: unknown."""
    process: str = ""
    """The worker's process, see `kvrelay.process_identity`."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def encode_record(record: WorkerRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for an invalid record."""
    return _decoder.decode(data)


def record_as_json(record: WorkerRecord) -> bytes:
    return msgspec.json.encode(record)


def record_from_json(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for an invalid record."""
    return msgspec.json.decode(data, type=WorkerRecord)


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
        source = resources.files("kvrelay.fleet").joinpath("registry.lua").read_text(encoding="utf-8")
        self._script: Any = self._redis.register_script(source)

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
        worker_id, ttl_ms = record.worker_id, int(ttl_s * 1000)
        slot, *holder = await self._run(record.model, "join", worker_id, record.incarnation, ttl_ms, MAX_SLOTS, ended)
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
        data, ttl_ms = encode_record(record), int(ttl_s * 1000)
        holder: bytes = await self._run(
            record.model, "renew", record.worker_id, record.incarnation, data, ttl_ms, record.slot
        )
        if holder:
            raise LeaseLost(
                f"slot {record.slot} of worker {record.worker_id} is lost to incarnation {holder.decode()} "
                f"(own: {record.incarnation})"
            )

    async def leave(self, record: WorkerRecord) -> bool:
        """Frees the slot; False if it was already lost. Raises RegistryUnavailable."""
        return bool(await self._run(record.model, "leave", record.incarnation, record.slot))

    async def list_workers(self, model: str) -> list[WorkerRecord]:
        """Workers of a model with valid leases, by slot, in one round trip. Raises RegistryUnavailable.

        An unreadable record (of a newer version) is skipped with a warning.
        """
        workers = []
        answer = await self._run(model, "list")
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
        return bool(await self._run(model, "drain", worker_id, "1" if draining else "0"))

    async def close(self) -> None:
        """Closes the connections. Leases remain until they expire."""
        with suppress(*REDIS_FAILED):
            await self._redis.aclose()

    async def _run(self, model: str, operation: str, *arguments: str | bytes | int) -> Any:
        """Runs an operation of registry.lua."""
        return await self._call(self._script(keys=self._keys(model), args=[operation, *arguments]))

    def _keys(self, model: str) -> list[str]:
        """Redis keys of a model. They share a hash tag, so a Cluster stores them on one node."""
        tag = f"{self._prefix}:{{{quote(model, safe='/')}}}"
        return [f"{tag}:leases", f"{tag}:records", f"{tag}:drains"]

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
