"""Sends requests when they are due and measures its own delay, which would make the server look better.

Open loops (a rate, a trace) send at the due time whatever is still running. Closed loops (a concurrency) send the next
request when one has ended, which hides queueing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay_bench.answer_reader import Record
from kvrelay_bench.http import Client
from kvrelay_bench.workload import Ask

WATCH_S = 0.02

_SendOne = Callable[[int], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load. `concurrency` is None for an open loop, which follows the arrivals. No request begins after
    `duration_s`. `is_distinct`: no two prompts have a common beginning, of this load or of others."""

    name: str
    asks: Sequence[Ask]
    concurrency: int | None = None
    duration_s: float | None = None
    is_distinct: bool = False


@dataclass(slots=True)
class LoadOutcome:
    """Result of one load on one endpoint. `cpu_share`: share of one core used by the generator. `stalls_s`: delays of
    its event loop; time stamps may be late by as much. `is_partial`: the load was cancelled, and `records` are those
    that had ended by then. `is_distinct`: as of the load."""

    records: list[Record]
    cpu_share: float
    stalls_s: list[float]
    is_partial: bool = False
    is_distinct: bool = False


async def run_load(
    client: Client,
    point: LoadPoint,
    bodies: Sequence[bytes],
    timeout_s: float,
    on_end: Callable[[int], None],
    *,
    keeps_partial: bool = False,
) -> LoadOutcome:
    """Runs a load to its end. `bodies` are the encoded HTTP requests of its asks.

    Calls `on_end` with the number of ended requests. With `keeps_partial`, the outcome of a cancelled load is returned
    with what has ended, and the cancellation goes no further.
    """
    records = [Record(ask.arrival_s) for ask in point.asks]
    ended: set[int] = set()
    is_partial = False

    async def one(number: int) -> None:
        await client.send(bodies[number], records[number], timeout_s)
        ended.add(number)
        on_end(len(ended))

    client.started = time.perf_counter()
    cpu_s, watch = time.process_time(), asyncio.create_task(_watch())
    last_s = float("inf") if point.duration_s is None else point.duration_s
    try:
        if point.concurrency is None:
            await _open_loop(client, records, one, last_s)
        else:
            await _closed_loop(client, records, one, point.concurrency, last_s)
    except asyncio.CancelledError:
        if not keeps_partial:
            watch.cancel()
            raise
        is_partial = True
    wall_s = client.clock()
    cpu_s = time.process_time() - cpu_s
    watch.cancel()
    stalls_s = (await asyncio.gather(watch, return_exceptions=True))[0]
    return LoadOutcome(
        records=[records[number] for number in sorted(ended)],
        cpu_share=cpu_s / wall_s,
        stalls_s=stalls_s if isinstance(stalls_s, list) else [],
        is_partial=is_partial,
        is_distinct=point.is_distinct,
    )


async def _open_loop(client: Client, records: Sequence[Record], one: _SendOne, last_s: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, record in enumerate(records):
            if record.intended_s > last_s:
                return
            while (wait_s := record.intended_s - client.clock()) > 0:  # a timer may fire early by its resolution
                await asyncio.sleep(wait_s)
            tasks.create_task(one(number))


async def _closed_loop(
    client: Client, records: Sequence[Record], one: _SendOne, concurrency: int, last_s: float
) -> None:
    numbers = iter(range(len(records)))

    async def worker() -> None:
        for number in numbers:  # shared by all workers
            if client.clock() > last_s:
                return
            records[number].intended_s = client.clock()
            await one(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(records))):
            tasks.create_task(worker())


async def _watch() -> list[float]:
    """Measures the delay of a timer repeatedly until cancelled."""
    late_s: list[float] = []
    try:
        while True:
            due = time.perf_counter() + WATCH_S
            await asyncio.sleep(WATCH_S)
            late_s.append(max(0.0, time.perf_counter() - due))
    except asyncio.CancelledError:
        return late_s
