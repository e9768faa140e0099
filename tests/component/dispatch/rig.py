"""A dispatcher on real sockets, with scripted workers and a registry to be switched off."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from kvrelay.fleet import RegistryUnavailable, WorkerRecord
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import LinkEvent
from kvrelay.protocol.sampling import Sampling
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings, GenerateRequest
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.fleet.watch import StaticWorkers
from tests.component.dispatch.fake_workers import FAST, FakeDecode, FakePrefill, FakeWorker
from tests.fakes.delta_reader import read_batches
from tests.fakes.waiting import PATIENCE_S, until

PROMPT = [1, 2, 3, 4, 5]


class Rig:
    """A dispatcher and its fleet."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.registry_is_away = False
        self._numbers = itertools.count()
        self._dispatcher: RouterDispatcher | None = None

    @property
    def dispatcher(self) -> RouterDispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    async def start(
        self, *workers: FakeWorker, static: StaticWorkers | None = None, has_registry: bool = True, **settings: Any
    ) -> None:
        """Starts the dispatcher, and waits until it knows all workers."""
        for worker in workers:
            self.add(worker)
        values = {"registry_interval_s": 0.05, "status_interval_s": 0.2} | settings
        registry = self._list_workers if has_registry else None
        self._dispatcher = RouterDispatcher(self._messenger, registry, DispatchSettings(**values), static=static)
        self.dispatcher.start()
        await until(lambda: self.states() == dict.fromkeys(self.workers, "ready"))

    def add(self, worker: FakeWorker) -> None:
        worker.start()
        self.workers[worker.worker_id] = worker

    def states(self) -> dict[str, str]:
        now = time.monotonic()
        return {each["worker_id"]: each["state"] for each in self.dispatcher.view.describe(frozenset(), now)}

    def submit(self, max_tokens: int = 6, num_sequences: int = 1, **options: Any) -> RunningRequest:
        prompt_logprobs = options.pop("prompt_logprobs", None)
        request = GenerateRequest(
            request_id=f"request-{next(self._numbers)}",
            prompt_ids=options.pop("prompt_ids", PROMPT),
            sampling=Sampling(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            num_sequences=num_sequences,
            **options,
        )
        return self.dispatcher.submit(request)

    def record(self, handle: RunningRequest) -> dict[str, Any]:
        record = self.dispatcher.recent_request(handle.request.request_id)
        assert record is not None
        return record

    async def nothing_is_left(self) -> None:
        """On the living workers and in the dispatcher."""
        await until(lambda: not any(worker.tasks for worker in self.workers.values()))
        assert self.dispatcher.num_running == 0
        assert self.dispatcher.load.is_empty

    async def close(self) -> None:
        await self.dispatcher.close()
        for worker in self.workers.values():
            worker.kill()

    def _messenger(self, on_event: Callable[[LinkEvent], None]) -> Messenger:
        return Messenger("router", on_event, settings=FAST)

    async def _list_workers(self) -> list[WorkerRecord]:
        if self.registry_is_away:
            raise RegistryUnavailable("no answer")
        return [worker.record for worker in self.workers.values() if not worker.dead]


async def read(handle: RunningRequest) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for delta in await read_deltas(handle):
        tokens.setdefault(delta.sequence, []).extend(delta.token_ids)
    return tokens


async def read_deltas(handle: RunningRequest) -> list[SequenceDelta]:
    deltas = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in read_batches(handle):
            deltas += batch
    return deltas


def pair() -> tuple[FakePrefill, FakeDecode]:
    return FakePrefill("p0"), FakeDecode("d0")


def two_pairs() -> tuple[FakePrefill, FakePrefill, FakeDecode, FakeDecode]:
    return FakePrefill("p0"), FakePrefill("p1"), FakeDecode("d0"), FakeDecode("d1")
