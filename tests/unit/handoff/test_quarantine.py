"""When slots of a one-sided transport are safe: proofs, and what is none."""

from __future__ import annotations

import itertools

import pytest

from kvrelay.handoff.quarantine import ASK_AT_MOST_EVERY_S, FIRST_ASK_S, OVERDUE_AFTER_S, SETTLE_TICKS, Quarantine
from kvrelay.process_identity import can_be_seen, has_ended, own_identity
from kvrelay.protocol.messages import PeerRef

PEER, OTHER = PeerRef("p", "1", "tcp://p"), PeerRef("q", "1", "tcp://q")
KEY, SECOND = ("a", 1, 0), ("b", 1, 0)
HOUR_S = 3600.0


class Machine:
    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.seen: set[str] = set()  # from here
        self.quarantine = Quarantine(self.ended.__contains__, self.seen.__contains__)

    def safe_after(self, num_ticks: int, now: float = 0.0) -> list[tuple[str, int, int]]:
        return [key for _ in range(num_ticks) for key in self.quarantine.tick(now).safe]


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.quarantine.add(KEY, PEER, ["process"], 0.0)
    return made


def test_slots_of_a_living_sender_wait_for_its_word_and_then_settle(machine: Machine) -> None:
    machine.ended.add("process")  # not looked at while its link is up
    assert machine.safe_after(100) == []
    machine.quarantine.drained(KEY)
    assert machine.safe_after(SETTLE_TICKS - 1) == []
    assert machine.safe_after(1) == [KEY]
    assert machine.safe_after(100) == []


def test_silence_is_no_proof(machine: Machine) -> None:
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    assert machine.quarantine.num_lost == 1
    assert machine.safe_after(1000, HOUR_S) == []
    machine.quarantine.drained(KEY)
    assert machine.quarantine.num_lost == 0
    assert machine.safe_after(SETTLE_TICKS) == [KEY]


def test_the_end_of_the_process_is_one(machine: Machine) -> None:
    machine.quarantine.add(SECOND, PEER, ["another process"], 0.0)
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    machine.ended.add("process")
    assert machine.safe_after(100) == [KEY]


def test_a_newer_start_is_one_also_after_silence(machine: Machine) -> None:
    machine.quarantine.add(SECOND, OTHER, ["process of q"], 0.0)
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    assert machine.safe_after(100) == []
    machine.quarantine.lost(PEER, 0.0, replaced=True)
    assert machine.safe_after(100) == [KEY]


def test_a_newer_start_is_none_while_the_older_process_is_seen_to_live(machine: Machine) -> None:
    """Stopped in the middle of a copy, and a second one was started under its name: it may wake up."""
    machine.seen.add("process")
    machine.quarantine.lost(PEER, 0.0, replaced=True)
    assert machine.quarantine.num_lost == 1
    assert machine.safe_after(1000, HOUR_S) == []
    machine.ended.add("process")
    assert machine.safe_after(SETTLE_TICKS) == [KEY]


RANKS = ("rank 0", "rank 1", "rank 2")


def test_each_process_of_a_sender_with_several_ranks_must_have_ended() -> None:
    for order in itertools.permutations(RANKS):
        machine = Machine()
        machine.quarantine.add(KEY, PEER, RANKS, 0.0)
        machine.quarantine.lost(PEER, 0.0, replaced=False)
        for process in order:
            assert machine.safe_after(2 * SETTLE_TICKS, HOUR_S) == []
            machine.ended.add(process)
        assert machine.safe_after(SETTLE_TICKS, HOUR_S) == [KEY]


@pytest.mark.parametrize("seen", [each for n in range(4) for each in itertools.combinations(RANKS, n)], ids=str)
def test_a_newer_start_stands_for_the_ranks_that_cannot_be_seen(seen: tuple[str, ...]) -> None:
    machine = Machine()
    machine.seen.update(seen)
    machine.quarantine.add(KEY, PEER, RANKS, 0.0)
    machine.quarantine.lost(PEER, 0.0, replaced=True)
    for process in seen:
        assert machine.safe_after(2 * SETTLE_TICKS, HOUR_S) == []
        machine.ended.add(process)
    assert machine.safe_after(SETTLE_TICKS, HOUR_S) == [KEY]


def test_a_rank_that_is_stopped_keeps_the_slots_also_if_its_end_is_the_last_unknown() -> None:
    """Its worker is replaced, and the other ranks were seen to end before."""
    machine = Machine()
    machine.seen.update(RANKS)
    machine.quarantine.add(KEY, PEER, RANKS, 0.0)
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    machine.ended.update(RANKS[:2])
    assert machine.safe_after(2 * SETTLE_TICKS, HOUR_S) == []
    machine.quarantine.lost(PEER, 0.0, replaced=True)
    assert machine.safe_after(2 * SETTLE_TICKS, HOUR_S) == []
    machine.ended.update(RANKS)
    assert machine.safe_after(SETTLE_TICKS, HOUR_S) == [KEY]


def test_a_silent_sender_is_asked_less_and_less_often(machine: Machine) -> None:
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    asked = [now for now in map(float, range(int(HOUR_S))) if machine.quarantine.tick(now).ask]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] == FIRST_ASK_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == ASK_AT_MOST_EVERY_S


@pytest.mark.parametrize("rest", ["12", "12/3/4", "x/3", "12/-3", "1" * 300 + "/3"])
def test_an_invalid_process_identity_is_no_proof_and_ends_no_tick(rest: str) -> None:
    quarantine = Quarantine(has_ended, can_be_seen)
    quarantine.add(KEY, PEER, [f"{own_identity().split('/')[0]}/{rest}"], 0.0)
    quarantine.lost(PEER, 0.0, replaced=False)
    assert all(quarantine.tick(HOUR_S).safe == () for _ in range(2 * SETTLE_TICKS))
    quarantine.lost(PEER, 0.0, replaced=True)
    assert [key for _ in range(SETTLE_TICKS) for key in quarantine.tick(HOUR_S).safe] == [KEY]


def test_slots_of_a_lost_or_stalled_sender_are_overdue_until_they_are_proven_safe(machine: Machine) -> None:
    machine.quarantine.add(SECOND, OTHER, ["process of q"], 0.0)
    assert not machine.quarantine.overdue(OVERDUE_AFTER_S)
    machine.quarantine.lost(PEER, 0.0, replaced=False)
    assert machine.quarantine.overdue(0.0) == {KEY}
    assert machine.quarantine.overdue(OVERDUE_AFTER_S + 1) == {KEY, SECOND}
    machine.quarantine.drained(KEY)
    machine.quarantine.drained(SECOND)
    assert not machine.quarantine.overdue(OVERDUE_AFTER_S + 1)
