"""Sends requests when they are due, and watches itself: a generator that is late would flatter the server.

Open loops (a rate, a trace) send at the intended time whatever is still running; closed loops (a concurrency) send the
next request when one has ended, which hides queueing: a slow server is asked less.
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
    """One load to run. `concurrency` None: open loop, by the arrivals."""

    name: str
    asks: Sequence[Ask]
    concurrency: int | None = None


@dataclass(slots=True)
class LoadOutcome:
    """Of one load on one endpoint. `cpu_share`: of one core, taken by the generator. `stalls_s`: by how much its event
    loop was late, over the run; time stamps may be late by as much."""

    records: list[Record]
    cpu_share: float
    stalls_s: list[float]


async def run_load(
    client: Client, point: LoadPoint, bodies: Sequence[bytes], timeout_s: float, on_end: Callable[[int], None]
) -> LoadOutcome:
    """Runs a load to its end. `bodies`: HTTP requests as they go over the wire, one for each of the point's.

    `on_end` is told how many have ended.
    """
    records = [Record(ask.arrival_s) for ask in point.asks]
    num_ended = 0

    async def one(number: int) -> None:
        nonlocal num_ended
        await client.send(bodies[number], records[number], timeout_s)
        num_ended += 1
        on_end(num_ended)

    client.started = time.perf_counter()
    cpu_s, watch = time.process_time(), asyncio.create_task(_watch())
    if point.concurrency is None:
        await _open_loop(client, records, one)
    else:
        await _closed_loop(client, records, one, point.concurrency)
    wall_s = client.clock()
    cpu_s = time.process_time() - cpu_s
    watch.cancel()
    stalls_s = (await asyncio.gather(watch, return_exceptions=True))[0]
    return LoadOutcome(records, cpu_s / wall_s, stalls_s if isinstance(stalls_s, list) else [])


async def _open_loop(client: Client, records: Sequence[Record], one: _SendOne) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, record in enumerate(records):
            while (wait_s := record.intended_s - client.clock()) > 0:  # a timer may come early by its resolution
                await asyncio.sleep(wait_s)
            tasks.create_task(one(number))


async def _closed_loop(client: Client, records: Sequence[Record], one: _SendOne, concurrency: int) -> None:
    numbers = iter(range(len(records)))

    async def worker() -> None:
        for number in numbers:  # shared: each takes the next
            records[number].intended_s = client.clock()
            await one(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(records))):
            tasks.create_task(worker())


async def _watch() -> list[float]:
    """By how much a timer comes late, again and again, until it is cancelled."""
    late_s: list[float] = []
    try:
        while True:
            due = time.perf_counter() + WATCH_S
            await asyncio.sleep(WATCH_S)
            late_s.append(max(0.0, time.perf_counter() - due))
    except asyncio.CancelledError:
        return late_s
