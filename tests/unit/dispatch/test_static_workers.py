"""Whatever registry and pages said on the way, in the end the view has the starts that live."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol.messages import Status
from kvrelay_router.fleet.load import OutstandingLoad
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.fleet.watch import StaticWorker, merged
from tests.fakes.records import worker_record

STEPS = st.sampled_from(["start", "end", "lease", "lease ends", "page", "silence", "heard", "lost", "look"])
TIMES = st.integers(0, 9)


class World:
    """One worker whose starts are named by a clock that may be set to anything, as registry, page and router see it."""

    def __init__(self, has_registry: bool) -> None:
        self.has_registry = has_registry
        self.num_starts = 0
        self.living: WorkerRecord | None = None
        self.registered: list[WorkerRecord] = []
        self.page = StaticWorker("http://w:1")
        self.view = FleetView(OutstandingLoad())

    def act(self, step: str, clock: int) -> None:
        match step:
            case "start":
                self.num_starts += 1
                self.living = worker_record(worker_id="w", incarnation=f"{clock}-{self.num_starts}")
            case "end":
                self.living = None
            case "lease" if self.has_registry and self.living is not None:
                self.registered = [msgspec.structs.replace(self.living, slot=0)]
            case "lease ends" if self.registered != [self.living]:
                self.registered = []
            case "page" if self.living is not None:
                self.page.record, self.page.silence = self.living, ""
            case "silence":
                self.page.silence = "no answer"
            case "heard":
                self.hear()
            case "lost":
                self.lose()
            case "look":
                self.look()

    def hear(self) -> None:
        for peer in self.view.peers():
            if self.living is not None and peer.incarnation == self.living.incarnation:
                self.view.answered(peer, Status(query=1, draining=False, queues={}, blocks={}, totals={}), 0.0)

    def lose(self) -> None:
        """The link notices that what is not there does not answer."""
        for peer in self.view.peers():
            if self.living is None or peer.incarnation != self.living.incarnation:
                self.view.lost(peer, "silent", 0.0)

    def look(self) -> None:
        static = [self.page] if self.page.record is not None else []
        self.view.registered(merged(self.registered, static, self.view.is_gone), 0.0)


@given(st.booleans(), st.lists(st.tuples(STEPS, TIMES), max_size=40))
def test_the_living_start_is_found_by_its_page_alone(has_registry: bool, steps: list[tuple[str, int]]) -> None:
    """Leases of earlier starts may hold for ever, as the last that was heard of a registry that is away."""
    world = World(has_registry)
    for step, clock in [*steps, ("start", 0), ("page", 0)]:
        world.act(step, clock)
    for _ in range(2):
        world.look()
        world.lose()
    world.look()
    assert world.living is not None
    assert [peer.incarnation for peer in world.view.peers()] == [world.living.incarnation]


@given(st.lists(st.tuples(STEPS, TIMES), max_size=40))
def test_what_ended_is_forgotten_and_what_only_has_no_page_is_not(steps: list[tuple[str, int]]) -> None:
    world = World(has_registry=False)
    for step, clock in [*steps, ("start", 0), ("page", 0), ("look", 0), ("lost", 0), ("look", 0), ("heard", 0)]:
        world.act(step, clock)
    for step in ("silence", "look", "lost", "look"):
        world.act(step, 0)
    assert len(world.view.peers()) == 1
    for step in ("end", "lost", "look"):
        world.act(step, 0)
    assert world.view.peers() == []


def test_the_registrys_record_of_the_same_start_counts() -> None:
    own = worker_record(worker_id="w")
    registered = msgspec.structs.replace(own, slot=3, draining=True)
    assert merged([registered], [StaticWorker("http://w:1", own)], lambda record: False) == [registered]
