"""The watch ends whatever the registry's client does."""

from __future__ import annotations

import asyncio
import contextlib

from kvrelay.fleet import WorkerRecord
from kvrelay_router.dispatch.load import OutstandingLoad
from kvrelay_router.fleet_view import FleetView
from kvrelay_router.fleet_watch import FleetWatch
from tests.fakes.waiting import PATIENCE_S


async def test_it_closes_although_a_cancellation_in_the_registry_is_swallowed() -> None:
    looks, answer = asyncio.Event(), asyncio.Event()

    async def list_workers() -> list[WorkerRecord]:
        looks.set()
        with contextlib.suppress(asyncio.CancelledError):  # as redis does now and then
            await answer.wait()
        return []

    watch = FleetWatch(
        FleetView(OutstandingLoad()), list_workers, lambda peer, query: None, lambda: None, registry_interval_s=0.01
    )
    watch.start()
    await looks.wait()
    closing = asyncio.create_task(watch.close())
    await asyncio.sleep(0)
    answer.set()
    await asyncio.wait_for(closing, PATIENCE_S)
