"""The fleet view: what the registry says, what the workers say, and which of the two counts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol.messages import LoadReport, PeerRef, Status, StatusQuery
from kvrelay_router.fleet.load import Held, OutstandingLoad
from kvrelay_router.fleet.view import REGISTRY_GRACE_S, FleetView, KnownWorker, WorkerState
from kvrelay_router.fleet.watch import FleetWatch
from kvrelay_router.routing.estimates import BlockNaming
from tests.fakes.waiting import PATIENCE_S
from tests.unit.dispatch.routed_fleet import record_of


def record(
    worker_id: str, role: Literal["prefill", "decode"] = "decode", incarnation: int = 1, **changes: Any
) -> WorkerRecord:
    plain = WorkerRecord(
        worker_id=worker_id,
        role=role,
        incarnation=f"{incarnation:016x}",
        address=f"tcp://{worker_id}",
        model="m",
        fingerprint="f",
        protocol_version=1,
        block_size=16,
        num_blocks=100,
        max_model_len=512,
        vocab_size=1000,
    )
    return msgspec.structs.replace(plain, **changes)


def ref(worker: WorkerRecord) -> PeerRef:
    return PeerRef(worker.worker_id, worker.incarnation, worker.address)


def status(draining: bool = False, **queues: int) -> Status:
    return Status(query=1, draining=draining, queues=queues, blocks={"free": 7, "cached": 3}, totals={})


class Fleet:
    """A view with a clock to turn."""

    def __init__(self, *workers: WorkerRecord) -> None:
        self.load = OutstandingLoad()
        self.changes: list[tuple[str, WorkerState]] = []
        self.view = FleetView(self.load, self._changed)
        self.now = 100.0
        self.view.registered(workers, self.now)
        for worker in workers:
            self.view.answered(ref(worker), status(), self.now)

    def _changed(self, worker: KnownWorker, state: WorkerState, reason: str) -> None:
        self.changes.append((worker.record.worker_id, state))

    def states(self) -> dict[str, str]:
        return {worker["worker_id"]: worker["state"] for worker in self.view.describe(frozenset(), self.now)}

    def usable(self) -> list[str]:
        candidates = self.view.candidates(self.now)
        return [candidate.worker_id for candidate in (*candidates.prefill, *candidates.decode)]


def test_a_lost_worker_comes_back_when_it_answers() -> None:
    fleet = Fleet(record("d"))
    fleet.view.lost(ref(record("d")), "silent", fleet.now)
    assert fleet.states() == {"d": "lost"}
    assert fleet.usable() == []
    fleet.view.registered([record("d")], fleet.now)
    assert fleet.states() == {"d": "lost"}
    fleet.view.answered(ref(record("d")), status(), fleet.now)
    assert fleet.usable() == ["d"]
    assert fleet.changes[-2:] == [("d", WorkerState.LOST), ("d", WorkerState.READY)]


def test_what_the_registry_changes_is_told() -> None:
    fleet = Fleet(record("d"))
    fleet.view.registered([record("d", draining=True)], fleet.now)
    fleet.view.registered([record("d")], fleet.now)
    assert fleet.changes[-2:] == [("d", WorkerState.DRAINING), ("d", WorkerState.READY)]


def test_a_newer_incarnation_takes_the_place_of_an_older_one_and_not_the_other_way() -> None:
    fleet = Fleet(record("d", incarnation=5))
    fleet.view.lost(ref(record("d", incarnation=5)), "killed", fleet.now)
    fleet.view.registered([record("d", incarnation=6)], fleet.now)
    assert fleet.states() == {"d": "joining"}
    fleet.view.registered([record("d", incarnation=5)], fleet.now)
    assert fleet.states() == {"d": "joining"}
    fleet.view.answered(ref(record("d", incarnation=5)), status(), fleet.now)
    assert fleet.usable() == []
    fleet.view.lost(ref(record("d", incarnation=5)), "killed", fleet.now)
    fleet.view.answered(ref(record("d", incarnation=6)), status(), fleet.now)
    assert fleet.usable() == ["d"]


def test_the_limits_of_the_last_workers_hold_while_none_is_ready() -> None:
    prefill = record("p", "prefill", max_running=9, max_model_len=600)
    fleet = Fleet(prefill, record("d", max_running=4, max_model_len=500))
    limits = fleet.view.limits(fleet.now)
    assert limits is not None and (limits.max_model_len, limits.max_running) == (500, 4)
    fleet.view.lost(ref(record("d")), "killed", fleet.now)
    assert fleet.view.limits(fleet.now) == limits
    fleet.view.lost(ref(prefill), "killed", fleet.now)
    fleet.view.registered([], fleet.now)
    assert fleet.states() == {} and fleet.view.limits(fleet.now) == limits
    newer = record("d", incarnation=2, max_running=8, max_model_len=400)
    fleet.view.registered([newer], fleet.now)
    fleet.view.answered(ref(newer), status(), fleet.now)
    limits = fleet.view.limits(fleet.now)
    assert limits is not None and (limits.max_model_len, limits.max_running) == (400, 8)


def test_a_start_with_an_earlier_clock_is_taken_where_the_known_one_is_gone() -> None:
    fleet = Fleet(record("d", incarnation=5))
    fleet.view.registered([record("d", incarnation=3)], fleet.now)
    assert fleet.usable() == ["d"]
    fleet.view.answered(ref(record("d", incarnation=3)), status(), fleet.now)
    fleet.view.lost(ref(record("d", incarnation=5)), "killed", fleet.now)
    fleet.view.registered([record("d", incarnation=3)], fleet.now)
    assert fleet.states() == {"d": "joining"}
    fleet.view.answered(ref(record("d", incarnation=3)), status(), fleet.now)
    assert fleet.usable() == ["d"]


def test_draining_workers_get_nothing_new_whoever_says_so() -> None:
    fleet = Fleet(record("a"), record("b"), record("c"))
    fleet.view.answered(ref(record("a")), status(draining=True), fleet.now)
    fleet.view.registered([record("a"), record("b", draining=True), record("c")], fleet.now)
    assert fleet.states() == {"a": "draining", "b": "draining", "c": "ready"}
    assert fleet.usable() == ["c"]


def test_a_worker_that_left_the_registry_is_used_for_the_grace_time_only() -> None:
    fleet = Fleet(record("d"))
    fleet.view.registered([], fleet.now)
    assert fleet.usable() == ["d"]
    fleet.now += REGISTRY_GRACE_S + 1
    assert fleet.states() == {"d": "draining"}
    assert fleet.usable() == []
    fleet.view.registered([record("d")], fleet.now)
    assert fleet.usable() == ["d"]


def test_a_worker_that_is_lost_and_not_registered_is_forgotten() -> None:
    fleet = Fleet(record("d"))
    fleet.view.registered([], fleet.now)
    fleet.view.lost(ref(record("d")), "silent", fleet.now)
    assert fleet.states() == {"d": "lost"}
    fleet.view.registered([], fleet.now)
    assert fleet.states() == {}


def test_an_incompatible_worker_is_shown_with_the_reason_and_neither_used_nor_asked() -> None:
    fleet = Fleet(record("d"))
    fleet.view.refused(ref(record("d")), "speaks protocol version 9", fleet.now)
    assert fleet.usable() == []
    assert fleet.view.peers() == []
    (shown,) = fleet.view.describe(frozenset(), fleet.now)
    assert (shown["state"], shown["reason"]) == ("incompatible", "speaks protocol version 9")
    assert fleet.view.limits(fleet.now) is None
    fleet.view.registered([record("d", incarnation=2)], fleet.now)
    assert fleet.view.peers() == [ref(record("d", incarnation=2))]


def test_limits_are_the_least_of_the_ready_workers() -> None:
    fleet = Fleet(record("a", max_model_len=100), record("b", max_model_len=50, vocab_size=900))
    limits = fleet.view.limits(fleet.now)
    assert limits is not None
    assert (limits.max_model_len, limits.vocab_size) == (50, 900)
    fleet.view.lost(ref(record("b")), "silent", fleet.now)
    limits = fleet.view.limits(fleet.now)
    assert limits is not None and limits.max_model_len == 100


def test_reported_load_counts_beside_the_routers_own_and_not_twice() -> None:
    worker = record("p", role="prefill")
    fleet = Fleet(worker)
    mine = Held()
    fleet.load.move(mine, ref(worker), 300, None)
    assert _queued_tokens(fleet) == 300
    load = LoadReport(queued_tokens=500, own_queued_tokens=300)
    fleet.view.answered(ref(worker), msgspec.structs.replace(status(), load=load), fleet.now)
    assert _queued_tokens(fleet) == 500
    fleet.load.move(mine, None, 0, None)
    assert _queued_tokens(fleet) == 200


def _queued_tokens(fleet: Fleet) -> int:
    (candidate,) = fleet.view.candidates(fleet.now).prefill
    return candidate.queued_tokens


CHANGES = st.one_of(
    st.tuples(st.just("move"), st.integers(0, 3), st.sampled_from(["p0", "p1", ""]), st.integers(0, 300)),
    st.tuples(st.just("gave"), st.integers(0, 1), st.just(""), st.integers(0, 2000)),
    st.tuples(st.just("answered"), st.integers(0, 2), st.just(""), st.integers(0, 5)),
    st.tuples(st.just("registered"), st.integers(0, 3), st.just(""), st.integers(100, 102)),
    st.tuples(st.just("asked"), st.just(0), st.just(""), st.just(0)),
)


@given(st.lists(CHANGES, max_size=40))
def test_candidates_are_what_they_would_be_if_none_were_kept(changes: list[tuple[str, int, str, int]]) -> None:
    """Whatever changed, and however often they were asked for between."""
    workers = [record("d0"), record("p0", "prefill"), record("p1", "prefill")]
    fleet, sequences = Fleet(*workers), [Held() for _ in range(4)]
    peers = {worker.worker_id: ref(worker) for worker in workers}
    for kind, number, name, amount in changes:
        match kind:
            case "move":
                decode = peers["d0"] if amount % 3 else None
                fleet.load.move(
                    sequences[number], peers.get(name), amount, decode, num_pairs=amount, num_pending_blocks=amount % 4
                )
            case "gave":
                fleet.load.gave((f"p{number}", workers[1].incarnation), amount, 1600)
            case "answered":
                fleet.view.answered(ref(workers[number]), status(queued_tokens=amount), fleet.now)
            case "registered":
                workers = [msgspec.structs.replace(worker, num_blocks=amount) for worker in workers]
                fleet.view.registered(workers[number:] + workers[:number], fleet.now)
            case "asked":
                fleet.view.candidates(fleet.now)
    kept = fleet.view.candidates(fleet.now)
    for worker in fleet.view._workers.values():
        worker.candidate = None
    assert kept == fleet.view.candidates(fleet.now)
    assert [each.worker_id for each in (*kept.decode, *kept.prefill)] == ["d0", "p0", "p1"]


FLEET_EVENTS = st.one_of(
    st.tuples(st.just("registered"), st.sets(st.integers(0, 3)), st.integers(1, 2)),
    st.tuples(st.sampled_from(["answered", "drains", "lost", "refused"]), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.just("time"), st.just(0), st.integers(1, 7)),
)


@given(st.lists(FLEET_EVENTS, max_size=30))
def test_who_is_ready_is_what_each_workers_state_says(events: list[tuple[str, Any, int]]) -> None:
    """After each event, and as time passes for those that left the registry; whatever was asked for before."""
    fleet = Fleet()
    for kind, what, number in events:
        if kind == "time":
            fleet.now += number
        elif kind == "registered":
            fleet.view.registered(
                [record(f"d{each}", incarnation=number, numerics=f"{each % 2}", block_size=16 + each) for each in what],
                fleet.now,
            )
        else:
            peer = ref(record(f"d{what}", incarnation=number))
            match kind:
                case "lost":
                    fleet.view.lost(peer, "it is silent", fleet.now)
                case "refused":
                    fleet.view.refused(peer, "of another version", fleet.now)
                case _:
                    fleet.view.answered(peer, status(draining=kind == "drains"), fleet.now)
        known = fleet.view._workers.values()
        ready = [each.record for each in known if each.state(fleet.now) is WorkerState.READY]
        assert fleet.usable() == [each.worker_id for each in ready]
        assert fleet.view.namings(fleet.now) == {BlockNaming("f", each.numerics, each.block_size) for each in ready}
        limits = fleet.view.limits(fleet.now)
        assert (limits is None) == (not ready and all(each.refused for each in known))


# -- the watch ends whatever the registry's client does --------------------------------------------------------------


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
