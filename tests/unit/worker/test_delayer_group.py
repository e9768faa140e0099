"""What members of a group believe of each other: whose word counts and for how long; nobody waits for the dead."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvrelay.protocol.messages import GroupLoad, PeerRef
from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, RankLoad
from kvrelay.worker.delayer_group import KEPT_S, DelayerGroup
from kvrelay.worker.prefill_delayer import PrefillDelayer

pytestmark = pytest.mark.unit
WAITING, RUNNING, IDLE = RankLoad(1, 0, 0, 1), RankLoad(0, 0, 3, 1), RankLoad(0, 0, 0, 1)
SILENCE_S, TICK_S, MAX_WAIT_S = 1.0, 0.1, 5.0


def ref(name: str, start: str = "1") -> PeerRef:
    return PeerRef(name, start, f"tcp://{name}")


def word(load: RankLoad, group: str = "g") -> GroupLoad:
    return GroupLoad(
        group=group,
        prefillable=load.prefillable,
        forced=load.forced,
        num_running=load.num_running,
        largest_prefill=load.largest_prefill,
    )


@dataclass
class Rig:
    """One worker's side. `sent`: to whom, and whether it spoke of a prompt."""

    now: float = 100.0
    num_news: int = 0
    sent: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group = DelayerGroup("g", self._send, self._news, silence_s=SILENCE_S, clock=lambda: self.now)
        self.group.found([ref("b"), ref("c")])

    def _send(self, peer: PeerRef, body: GroupLoad) -> None:
        self.sent.append((peer.peer_id, body.prefillable))

    def _news(self) -> None:
        self.num_news += 1


def test_only_members_that_were_heard_and_have_anything_to_do_count() -> None:
    rig = Rig()
    assert rig.group.share(WAITING) == (WAITING,)
    rig.group.heard(ref("b"), word(RUNNING))
    rig.group.heard(ref("c"), word(IDLE))
    assert rig.group.share(WAITING) == (WAITING, RUNNING)
    rig.group.heard(ref("c"), word(WAITING, "another group"))
    assert rig.group.share(WAITING) == (WAITING, RUNNING)


def test_a_silent_member_is_left_out_and_counts_again_when_it_is_heard() -> None:
    rig = Rig()
    rig.group.heard(ref("b"), word(RUNNING))
    rig.now += SILENCE_S
    assert rig.group.share(WAITING) == (WAITING, RUNNING)
    rig.now += 0.01
    assert rig.group.share(WAITING) == (WAITING,)
    rig.group.heard(ref("b"), word(RUNNING))
    assert rig.group.share(WAITING) == (WAITING, RUNNING)
    rig.group.lost(ref("b", "another start"))
    assert rig.group.num_live_members == 1
    rig.group.lost(ref("b"))
    assert rig.group.num_live_members == 0


def test_a_prompt_that_went_in_meanwhile_counts_until_the_next_pass() -> None:
    rig = Rig()
    rig.group.share(WAITING)
    rig.group.heard(ref("b"), word(WAITING))
    rig.group.heard(ref("b"), word(RUNNING))
    rig.now += 10 * KEPT_S
    assert rig.group.share(WAITING) == (WAITING, WAITING)
    assert rig.group.share(WAITING) == (WAITING, RUNNING)


def test_words_of_two_members_that_come_apart_meet() -> None:
    """C heard of B's prompt and let its own in, and C's word of that comes before B's."""
    rig = Rig()
    rig.group.heard(ref("c"), word(WAITING))
    rig.group.share(WAITING)
    rig.group.heard(ref("c"), word(RUNNING))
    assert rig.group.share(WAITING) == (WAITING, WAITING)
    rig.group.heard(ref("b"), word(WAITING))
    assert rig.group.share(WAITING) == (WAITING, WAITING, WAITING)


def test_what_others_had_before_one_waits_is_no_reason_to_go() -> None:
    rig = Rig()
    rig.group.share(RUNNING)
    rig.group.heard(ref("b"), word(WAITING))
    rig.group.heard(ref("b"), word(RUNNING))
    assert rig.group.share(WAITING) == (WAITING, RUNNING)


def test_prompts_are_told_at_once_and_the_rest_with_the_sign_of_life() -> None:
    rig = Rig()
    rig.group.share(RankLoad(0, 0, 1, 1))
    assert rig.sent == [("b", 0), ("c", 0)]
    rig.group.share(RankLoad(0, 0, 2, 1))
    assert len(rig.sent) == 2
    rig.group.tick()
    rig.group.share(RankLoad(1, 0, 2, 1))
    assert rig.sent[2:] == [("b", 0), ("c", 0), ("b", 1), ("c", 1)]
    rig.group.share(IDLE)
    rig.sent.clear()
    rig.group.tick()
    assert rig.sent == [], "an idle worker need not be heard"


def test_news_end_a_sleep_only_of_a_worker_that_holds_prompts_back() -> None:
    """What was heard, who was lost, and time that passed, each of which may end the delay."""
    rig = Rig()
    rig.group.share(RUNNING)
    rig.group.heard(ref("b"), word(WAITING))
    rig.group.tick()
    rig.group.lost(ref("b"))
    assert rig.num_news == 0
    rig.group.share(WAITING)
    rig.group.heard(ref("c"), word(RUNNING))
    assert rig.num_news == 1
    rig.group.tick()
    assert rig.num_news == 2
    rig.group.lost(ref("b"))
    assert rig.num_news == 2, "it is gone already"
    rig.group.lost(ref("c"))
    assert rig.num_news == 3


def test_the_registry_names_the_members_and_a_member_may_be_faster() -> None:
    rig = Rig()
    rig.group.heard(ref("d"), word(RUNNING))
    assert rig.group.num_live_members == 1
    rig.group.heard(ref("b", "2"), word(RUNNING))
    rig.group.found([ref("b", "1"), ref("e")])
    assert rig.group.num_live_members == 1, "d is not listed; the registry is behind with b"
    rig.group.found([ref("b", "3")])
    assert rig.group.num_live_members == 0, "another start, which was not heard yet"


class Process:
    """A worker's delayer in its group, with prompts that take a pass, and decodes that go on for some."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.group = DelayerGroup("g", self.send, lambda: None, silence_s=SILENCE_S, clock=lambda: world.now)
        settings = DelayerSettings(8, 1000, None, MAX_WAIT_S)
        self.delayer = PrefillDelayer(settings, self.group, lambda: world.now)
        self.prompts: list[float] = []  # when they came
        self.running: list[int] = []  # passes to go
        self.waits: list[float] = []
        self.is_dead = False

    def send(self, peer: PeerRef, body: GroupLoad) -> None:
        self.world.words.append((self.name, peer.peer_id, body))

    def step(self) -> None:
        num_admitted = 0
        if self.prompts and len(self.running) < 8 and not self.delayer.ask(len(self.running), 0.5):
            self.waits += [self.world.now - came for came in self.prompts]
            self.running += [self.world.random.randint(1, 30) for _ in self.prompts]
            num_admitted = len(self.prompts)
            self.prompts.clear()
        self.delayer.passed(len(self.running), num_admitted)
        self.running = [left - 1 for left in self.running if left > 1]


class World:
    """Processes that pass when they like, and words that come in order between two of them, but late."""

    def __init__(self, seed: int, num_processes: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.words: list[tuple[str, str, GroupLoad]] = []
        self.processes = {name: Process(name, self) for name in "abcd"[:num_processes]}
        for process in self.processes.values():
            process.group.found(ref(name) for name in self.processes if name != process.name)

    def deliver(self) -> None:
        pairs = {(source, target): None for source, target, _ in self.words}
        for pair in self.random.sample(sorted(pairs), self.random.randint(0, len(pairs))):
            index = next(i for i, (source, target, _) in enumerate(self.words) if (source, target) == pair)
            source, target, body = self.words.pop(index)
            if not self.processes[target].is_dead:
                self.processes[target].group.heard(ref(source), body)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_no_prompt_waits_longer_than_allowed_whoever_dies(seed: int, num_processes: int) -> None:
    world = World(seed, num_processes)
    rng = world.random
    num_sent = 0
    for tick in range(600):
        world.now += TICK_S / 4
        living = [process for process in world.processes.values() if not process.is_dead]
        if rng.random() < 0.1 and tick < 300:
            rng.choice(living).prompts.append(world.now)
            num_sent += 1
        if rng.random() < 0.01 and len(living) > 1:
            dead = rng.choice(living)
            dead.is_dead = True
            num_sent -= len(dead.prompts)
        for _ in range(rng.randint(0, 3)):
            world.deliver()
        for process in living:
            if tick % 4 == 0 and not process.is_dead:
                process.group.tick()
            if not process.is_dead:
                process.step()
    assert sum(len(process.waits) for process in world.processes.values()) == num_sent
    longest = max((wait for process in world.processes.values() for wait in process.waits), default=0.0)
    assert longest <= MAX_WAIT_S + TICK_S
