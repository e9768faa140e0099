"""What runs for a client ends when the client goes, whoever tells of it, and only then."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay_router.http.client_watch import ClientGone, ClientWatch, TaskTimeout
from kvrelay_router.http.event_writer import EventWriter
from kvrelay_router.http.uvicorn_internals import Exchange
from kvrelay_router.pending_memory import BodyBytes, PendingMemory


class Cycle:
    """What an `EventWriter` uses of uvicorn's; its own flow control."""

    def __init__(self, *, disconnected: bool = False) -> None:
        self.disconnected = disconnected
        self.flow = self
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def writer_of(cycle: Cycle) -> EventWriter:
    return EventWriter(Exchange(cast("RequestResponseCycle", cycle)), BodyBytes(PendingMemory()))


async def never_told() -> Message:
    """A connection that says nothing."""
    raise AssertionError("a writer tells: nobody is to be asked")


async def told_gone() -> Message:
    """A connection whose client went."""
    await asyncio.sleep(0)
    return {"type": "http.disconnect"}


def watching(receive: Any, writer: EventWriter | None, inside: list[str]) -> asyncio.Task[None]:
    """Runs for ever; `inside` says how far it came."""

    async def run() -> None:
        with ClientWatch(receive, writer):
            inside.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                inside.append("ended")

    return asyncio.create_task(run())


async def test_a_client_that_goes_ends_what_runs_for_it() -> None:
    cycle = Cycle()
    writer, inside = writer_of(cycle), list[str]()
    task = watching(never_told, writer, inside)
    await asyncio.sleep(0)
    assert inside == ["began"] and cycle.is_reading
    writer.report_gone()
    writer.report_gone()  # once is enough
    with pytest.raises(ClientGone):
        await task
    assert inside == ["began", "ended"] and task.cancelling() == 0


async def test_a_client_that_had_gone_before_does_too() -> None:
    inside = list[str]()
    with pytest.raises(ClientGone):
        await watching(never_told, writer_of(Cycle(disconnected=True)), inside)
    assert inside == ["began", "ended"]


async def test_without_a_writer_the_connection_is_asked() -> None:
    inside = list[str]()
    with pytest.raises(ClientGone):
        await watching(told_gone, None, inside)
    assert inside == ["began", "ended"]


@pytest.mark.parametrize("disconnected", [False, True])
async def test_what_is_over_is_not_cancelled(disconnected: bool) -> None:
    writer = writer_of(Cycle(disconnected=disconnected))
    with ClientWatch(never_told, writer):
        pass
    writer.report_gone()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)  # where a cancellation would come


@pytest.mark.parametrize("goes", [False, True])
async def test_another_cancellation_stays_one(goes: bool) -> None:
    writer, inside = writer_of(Cycle()), list[str]()
    task = watching(never_told, writer, inside)
    await asyncio.sleep(0)
    if goes:
        writer.report_gone()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside == ["began", "ended"]


async def _within(timeout_s: float, inside: list[str]) -> None:
    with TaskTimeout(timeout_s):
        inside.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            inside.append("ended")


async def test_what_is_late_is_ended_and_its_task_goes_on() -> None:
    inside = list[str]()
    with pytest.raises(TimeoutError):
        await _within(0.0, inside)
    assert inside == ["began", "ended"]
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)  # where a cancellation would come


async def test_what_is_in_time_leaves_no_timer() -> None:
    with TaskTimeout(0.0):
        pass
    for _ in range(3):
        await asyncio.sleep(0.001)  # where it would come


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_cancellation_from_outside_is_no_timeout(is_late: bool) -> None:
    inside = list[str]()
    watch = TaskTimeout(1e6)

    async def run() -> None:
        with watch:
            inside.append("began")
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    if is_late:
        watch._late()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside == ["began"]


async def test_within_a_timeout_may_be_another_one() -> None:
    with TaskTimeout(1e6):
        with pytest.raises(TimeoutError):
            await _within(0.0, [])
        await asyncio.sleep(0)
