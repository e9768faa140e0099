"""Tenants take turns at threads, by cost and weight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from kvrelay_router.text.tenant_threads import MAX_TENANTS, TenantThreads, ThreadShare
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.unit

FLOOD, LIGHT = ThreadShare(tenant="flood"), ThreadShare(tenant="light")


class Rig:
    """One thread, which is busy until `begin`."""

    def __init__(self) -> None:
        self.threads = TenantThreads(1, "test")
        self.order: list[str] = []
        self.begin = threading.Event()
        is_busy = threading.Event()
        self.futures: list[Future[None]] = [self.threads.submit(self._hold(is_busy), 1.0, FLOOD)]
        assert is_busy.wait(PATIENCE_S)

    def _hold(self, is_busy: threading.Event) -> Callable[[], None]:
        def hold() -> None:
            is_busy.set()
            assert self.begin.wait(PATIENCE_S)

        return hold

    def submit(self, name: str, tenant: ThreadShare, cost: float = 1.0) -> Future[None]:
        self.futures.append(self.threads.submit(lambda: self.order.append(name), cost, tenant))
        return self.futures[-1]

    def run(self) -> list[str]:
        self.begin.set()
        for future in self.futures:
            if not future.cancelled():
                future.result(PATIENCE_S)
        self.threads.close()
        return self.order


def test_a_light_tenant_waits_for_no_flood() -> None:
    rig = Rig()
    for number in range(100):
        rig.submit(f"flood-{number}", FLOOD)
    rig.submit("light", LIGHT)
    order = rig.run()
    assert order.index("light") <= 1 and len(order) == 101
    assert [name for name in order if name != "light"] == [f"flood-{number}" for number in range(100)]


def test_turns_follow_cost_and_weight() -> None:
    rig = Rig()
    heavy, weighty = ThreadShare(tenant="heavy"), ThreadShare(tenant="weighty", weight=2.0)
    for _ in range(10):
        rig.submit("heavy", heavy, cost=4.0)
        rig.submit("weighty", weighty, cost=4.0)
    for _ in range(40):
        rig.submit("light", LIGHT, cost=1.0)
    first = rig.run()[:28]
    assert [first.count(name) for name in ("heavy", "weighty", "light")] == [4, 8, 16]


def test_a_cancelled_job_takes_no_turn() -> None:
    rig = Rig()
    cancelled = [rig.submit("cancelled", LIGHT) for _ in range(3)]
    rig.submit("kept", LIGHT)
    assert all(future.cancel() for future in cancelled)
    assert rig.run() == ["kept"]


def test_an_error_reaches_its_caller_alone() -> None:
    rig = Rig()
    failing = rig.threads.submit(lambda: 1 // 0, 1.0, LIGHT)
    rig.submit("after", LIGHT)
    assert rig.run() == ["after"]
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)


def test_closing_drops_what_waits() -> None:
    rig = Rig()
    waiting = rig.submit("never", LIGHT)
    rig.threads.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
    rig.begin.set()
    rig.futures[0].result(PATIENCE_S)
    assert rig.order == []


def test_an_idle_thread_owes_nothing_to_its_past() -> None:
    rig = Rig()
    for _ in range(50):
        rig.submit("flood", FLOOD)
    rig.begin.set()
    for future in rig.futures:
        future.result(PATIENCE_S)
    rig.threads.submit(lambda: None, 1.0, LIGHT).result(PATIENCE_S)
    assert set(rig.threads._end_tags) <= {FLOOD.tenant, LIGHT.tenant}
    rig.threads.close()


def test_names_of_tenants_are_bounded() -> None:
    rig = Rig()
    for number in range(4 * MAX_TENANTS):
        rig.submit("", ThreadShare(tenant=str(number)))
    assert len(rig.threads._end_tags) <= 2 * MAX_TENANTS + 1
    assert len(rig.run()) == 4 * MAX_TENANTS
