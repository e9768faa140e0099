"""The watch ends whatever the registry's client does."""

from __future__ import annotations

import asyncio
import contextlib

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol.messages import PeerRef, StatusQuery
from kvrelay_router.fleet.load import OutstandingLoad
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.fleet.watch import FleetWatch
from tests.fakes.waiting import PATIENCE_S
from tests.unit.dispatch.routed_fleet import record_of


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


async def test_workers_learn_which_sessions_have_ended_once() -> None:
    view = FleetView(OutstandingLoad())
    view.registered([record_of("p0"), record_of("d0")], 0.0)
    sent: dict[str, list[list[str]]] = {"p0": [], "d0": []}
    come = asyncio.Event()

    def send(peer: PeerRef, query: StatusQuery) -> None:
        sent[peer.peer_id].append(query.ended_sessions)
        come.set()

    watch = FleetWatch(view, None, send, lambda: None, status_interval_s=0.01)
    watch.session_ended("a")
    watch.session_ended("b")
    watch.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while min(len(each) for each in sent.values()) < 3:
                come.clear()
                await come.wait()
    finally:
        await watch.close()
    for each in sent.values():
        assert [sessions for sessions in each if sessions] == [["a", "b"]]
