"""Readiness checks of `kvrelay up`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Set

from kvrelay.fleet import Registry, RegistryUnavailable

HTTP_TIMEOUT_S = 2.0


class WorkerReady:
    """A worker process is ready when all its workers are registered with new incarnations."""

    def __init__(self, registry: Registry, model: str, worker_ids: Set[str]) -> None:
        self._registry = registry
        self._model = model
        self._worker_ids = worker_ids
        self._found: set[tuple[str, str]] = set()
        self._stale: set[tuple[str, str]] = set()

    def restarted(self) -> None:
        """Remembers the old incarnations, whose leases may still be valid."""
        self._stale |= self._found

    async def is_ready(self) -> bool:
        """Returns whether all workers are registered; False if Redis does not answer."""
        try:
            workers = await self._registry.list_workers(self._model)
        except RegistryUnavailable:
            return False
        starts = {(each.worker_id, each.incarnation) for each in workers if each.worker_id in self._worker_ids}
        self._found = starts - self._stale
        return {worker_id for worker_id, _ in self._found} == self._worker_ids


class RouterReady:
    """A router is ready when GET /ready answers 200 and counts all workers started with it.

    Before that, it would serve without some workers, for example compute all prompts on decode.
    """

    def __init__(self, host: str, port: int, workers: Mapping[str, int]) -> None:
        self._host = host
        self._port = port
        self._workers = workers

    def restarted(self) -> None:
        """Does nothing: a dead router does not answer."""

    async def is_ready(self) -> bool:
        """Returns whether the router is ready; False if it does not listen."""
        try:
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                status, body = await self._get_ready()
            counted = json.loads(body)["workers"] if status == b"200" else None
        except (OSError, TimeoutError, ValueError, LookupError):
            return False  # nothing listens, or another server does
        return counted is not None and all(counted.get(role, 0) >= number for role, number in self._workers.items())

    async def _get_ready(self) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head.split(b" ", 2)[1] if head else b"", body


ReadyCheck = WorkerReady | RouterReady
"""Polled while a service starts. `restarted` is called before a restart: earlier readiness no longer counts."""
