"""The way from a thread to the event loop."""

from __future__ import annotations

import asyncio
from threading import Thread, get_ident

from kvrelay.handoff.transports.base import LoopPort


async def test_events_of_a_thread_arrive_in_order_on_the_loops_thread() -> None:
    arrived: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    port: LoopPort[int] = LoopPort(lambda event: arrived.put_nowait((event, get_ident())))

    def emit_all() -> None:
        for event in range(3):
            port.emit(event)

    Thread(target=emit_all).start()
    assert [await arrived.get() for _ in range(3)] == [(event, get_ident()) for event in range(3)]


async def test_a_thread_that_dies_is_reported_to_the_loop() -> None:
    reports: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.put_nowait(context))
    error = KeyError("gone")
    LoopPort[int](lambda event: None).report_crash("kv-sender", error)
    report = await reports.get()
    assert report["exception"] is error
    assert "kv-sender" in str(report["message"])


def test_an_event_for_a_closed_loop_is_dropped() -> None:
    async def make() -> LoopPort[int]:
        return LoopPort(lambda event: None)

    asyncio.run(make()).emit(1)
