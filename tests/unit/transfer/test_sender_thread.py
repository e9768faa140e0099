"""A sender's thread: it goes on without commands, and ends also if a library holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from kvrelay.handoff.transports import base
from kvrelay.handoff.transports.base import BlockPush, SenderEvent
from kvrelay.handoff.transports.outbox import InFlightSend, Outbox
from kvrelay.handoff.transports.sender_thread import Push, SenderThread
from tests.fakes.waiting import until

pytestmark = pytest.mark.unit
NUM_WAITS = 20_000


class StuckDriver:
    """A call of its library returns only when it is `released`."""

    def __init__(self) -> None:
        self.outbox = Outbox(1024, window=1, drain_timeout_s=1.0, idle_close_s=60.0, is_acknowledged=True)
        self.is_stuck, self.released, self.is_closed = Event(), Event(), Event()

    def enqueue(self, push: Push) -> None:
        self.is_stuck.set()
        self.released.wait()

    def collect(self) -> list[SenderEvent]:
        return []

    def expire(self) -> list[SenderEvent]:
        return []

    def send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        raise AssertionError("nothing was queued")

    def patience_s(self) -> float | None:
        return None

    def close(self) -> None:
        self.is_closed.set()


class ImpatientDriver:
    """Has nothing to send, and waits for commands as briefly as can be. Every other time there is one already."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.outbox = Outbox(1024, window=1, drain_timeout_s=1.0, idle_close_s=60.0, is_acknowledged=True)
        self.has_waited = Event()
        self._wake = wake
        self._num_waits = 0

    def enqueue(self, push: Push) -> None: ...

    def collect(self) -> list[SenderEvent]:
        self._num_waits += 1
        if self._num_waits % 2:
            self._wake()
        if self._num_waits >= NUM_WAITS:
            self.has_waited.set()
        return []

    def expire(self) -> list[SenderEvent]:
        return []

    def send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        raise AssertionError("nothing was queued")

    def patience_s(self) -> float | None:
        return 1e-9

    def close(self) -> None: ...


def test_every_wait_ends_in_time_without_a_command() -> None:
    """Writes in flight are polled between such waits, so one that does not end is a push that never ends."""
    drivers: list[ImpatientDriver] = []

    def make(wake: Callable[[], None]) -> ImpatientDriver:
        drivers.append(ImpatientDriver(wake))
        return drivers[0]

    async def test() -> None:
        sender = SenderThread("impatient", 4, make)
        sender.start(lambda event: None)
        await until(lambda: drivers and drivers[0].has_waited.is_set())
        sender.close()
        assert sender.has_ended

    asyncio.run(test())


def test_closing_does_not_wait_for_ever_and_says_whether_the_pool_is_still_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = StuckDriver()

    def make(wake: Callable[[], None]) -> Any:
        return driver

    async def test() -> None:
        sender = SenderThread("stuck", 4, make)
        sender.start(lambda event: None)
        sender.push("r", {}, [BlockPush(0, 0, 0)])
        assert await asyncio.to_thread(driver.is_stuck.wait, 30)
        monkeypatch.setattr(base, "END_TIMEOUT_S", 0.01)
        sender.close()
        assert not sender.has_ended and "left behind" in caplog.text and not driver.is_closed.is_set()
        monkeypatch.setattr(base, "END_TIMEOUT_S", 30.0)
        driver.released.set()
        sender.close()
        assert sender.has_ended and driver.is_closed.is_set()

    asyncio.run(test())
