"""When a worker whose id is taken waits, and when it says that the id is in use."""

from __future__ import annotations

from typing import cast

import pytest

from kvrelay.fleet import Registry, WorkerRecord
from kvrelay.fleet.worker_registry import WorkerIdTaken
from kvrelay.process_identity import own_identity
from kvrelay.worker import membership
from kvrelay.worker.membership import Membership
from tests.fakes.records import worker_record


class TakenRegistry:
    """The id is held by another incarnation, with the ends of its lease that `join` finds one after the other."""

    def __init__(self, holder: WorkerRecord, expiries: list[int]) -> None:
        self._holder = holder
        self.expiries = expiries

    async def check_server(self) -> None: ...

    async def join(self, record: WorkerRecord, ttl_s: float, *, ended: str) -> WorkerRecord:
        if not self.expiries:
            return worker_record(incarnation=record.incarnation, slot=0)
        raise WorkerIdTaken("w", self._holder.incarnation, self.expiries.pop(0), self._holder)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ID_POLL_S", 0)


async def join(expiries: list[int], process: str = "") -> TakenRegistry:
    """Runs a member until it has joined or raises."""
    registry = TakenRegistry(worker_record(incarnation="1", process=process), expiries)
    record = worker_record(incarnation="2")
    member = Membership(cast("Registry", registry), record, dict, ttl_s=5, interval_s=1)
    while not member.joined.is_set():
        try:
            await member._once(cast("Registry", registry))
        except WorkerIdTaken as taken:
            await member._wait_for_id(taken)
    return registry


async def test_a_lease_that_ends_earlier_than_before_was_not_renewed() -> None:
    """Redis failed over to a replica that lagged behind."""
    assert not (await join([5000, 5000, 4000, 4000])).expiries


@pytest.mark.parametrize("expiries", [[5000, 5001], [5000, 4000, 4001]])
async def test_a_lease_that_ends_later_than_before_is_in_use(expiries: list[int]) -> None:
    with pytest.raises(membership.WorkerIdInUse):
        await join(expiries)


@pytest.mark.parametrize("rest", ["12", "12/3/4", "x/3", "1" * 300 + "/3"])
async def test_the_lease_of_a_record_with_an_invalid_process_is_waited_for(rest: str) -> None:
    assert not (await join([5000, 5000], f"{own_identity().split('/')[0]}/{rest}")).expiries
