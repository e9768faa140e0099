"""A sender's thread ends also if a library holds it; and the way from a thread to the event loop."""

from __future__ import annotations

import asyncio
from threading import Event, Thread, get_ident

import numpy as np
import pytest

from kvrelay.handoff.transports import base
from kvrelay.handoff.transports.base import BlockPush, LoopPort, SenderEvent
from kvrelay.handoff.transports.outbox import Outbox
from kvrelay.handoff.transports.pool_memory import HostPool
from kvrelay.handoff.transports.sender_thread import QueuedPush, SenderThread
from tests.fakes.waiting import until

NUM_WAITS = 20_000


POOL = HostPool(np.zeros((4, 1024), np.uint8))


class IdleSender(SenderThread):
    """Has nothing to send."""

    def __init__(self) -> None:
        outbox = Outbox(1024, window=1, drain_timeout_s=1.0, idle_close_s=60.0, is_acknowledged=True)
        super().__init__("idle", POOL, outbox, None)

    def _collect(self) -> list[SenderEvent]:
        return []

    def _expire(self) -> list[SenderEvent]:
        return []


class StuckSender(IdleSender):
    """A call of its library returns only when it is `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck, self.released, self.is_closed = Event(), Event(), Event()

    def _enqueue(self, push: QueuedPush) -> None:
        self.is_stuck.set()
        self.released.wait()

    def _patience_s(self) -> float | None:
        return None

    def _leave_thread(self) -> None:
        self.is_closed.set()


class ImpatientSender(IdleSender):
    """Waits for commands as briefly as can be. Every other time there is one already."""

    def __init__(self) -> None:
        super().__init__()
        self.has_waited = Event()
        self._num_waits = 0

    def _collect(self) -> list[SenderEvent]:
        self._num_waits += 1
        if self._num_waits % 2:
            self._wake()
        if self._num_waits >= NUM_WAITS:
            self.has_waited.set()
        return []

    def _patience_s(self) -> float | None:
        return 1e-9


def test_every_wait_ends_in_time_without_a_command() -> None:
    """Writes in flight are polled between such waits, so one that does not end is a push that never ends."""

    async def test() -> None:
        sender = ImpatientSender()
        sender.start(lambda event: None)
        await until(sender.has_waited.is_set)
        sender.close()
        assert sender.has_ended

    asyncio.run(test())


def test_closing_does_not_wait_for_ever_and_says_whether_the_pool_is_still_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        sender = StuckSender()
        sender.start(lambda event: None)
        sender.push("r", {}, [BlockPush(0, 0, 0)])
        assert await asyncio.to_thread(sender.is_stuck.wait, 30)
        monkeypatch.setattr(base, "END_TIMEOUT_S", 0.01)
        sender.close()
        assert not sender.has_ended and "left behind" in caplog.text and not sender.is_closed.is_set()
        monkeypatch.setattr(base, "END_TIMEOUT_S", 30.0)
        sender.released.set()
        sender.close()
        assert sender.has_ended and sender.is_closed.is_set()

    asyncio.run(test())


# -- the way from a thread to the event loop -------------------------------------------------------------------------


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
