"""The receiver's machine alone, with any events in any order: what it commits has landed, and what it holds it frees
once."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.handoff import receiver
from kvrelay.handoff.receiver import ReceiverHandoff, ReceiverState
from kvrelay.handoff.transports.base import Corrupted, Landed
from kvrelay.protocol.messages import Abort, Cancel, Granted, Handoff
from kvrelay.state_machine import IllegalEvent
from tests.thoroughness import examples
from tests.unit.protocol.message_strategies import values

NUM_BLOCKS = 4
names = st.sampled_from(["r1", "r1", "r1", "r2", ""])
blocks = st.lists(st.integers(-1, NUM_BLOCKS), max_size=NUM_BLOCKS).map(tuple)
handoffs = st.builds(
    lambda message, reservation: msgspec.structs.replace(message, reservation=reservation), values(Handoff), names
)


def grant(reservation: str, first_block: int) -> Granted:
    slots = list(range(first_block, NUM_BLOCKS))
    return Granted(reservation=reservation, first_block=first_block, slots=slots, transport="t", endpoints=[{}])


EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Landed, names, blocks),
    st.builds(Landed, names, blocks),
    st.builds(Corrupted, names, blocks),
    handoffs,
    handoffs,
    st.builds(grant, names, st.integers(0, NUM_BLOCKS)),
    st.sampled_from([receiver.SlotsSafe(), Abort(reservation="r1", reason="no"), receiver.PrefillLost()]),
    st.sampled_from([receiver.BlocksOverdue("slow"), Cancel(reason="left"), receiver.CommitRefused("no")]),
)
OWN_MISTAKES = (Granted, receiver.CommitRefused, receiver.BlocksOverdue, receiver.SlotsSafe, Landed, Corrupted)
"""Events that this worker itself makes, and never in a state in which they are illegal. All others come from peers."""


class Oracle:
    """What arrived, and what may be done about it."""

    def __init__(self, machine: ReceiverHandoff, is_one_sided: bool) -> None:
        self._machine = machine
        self._is_one_sided = is_one_sided
        self._landed: set[int] = set()
        self._granted: Granted | None = None
        self._handoff: Handoff | None = None
        self._is_kept = False
        self.num_committed = self.num_freed = 0

    def feed(self, event: Any) -> None:
        before = dict(vars(self._machine))
        try:
            instructions = self._machine.handle(event)
        except IllegalEvent:
            assert isinstance(event, OWN_MISTAKES) and vars(self._machine) == before
            return
        self._note(event)
        for each in instructions:
            self._check(each, event)

    def _note(self, event: Any) -> None:
        granted = self._granted
        match event:
            case Granted():
                self._granted = event
            case Landed(reservation, landed) if granted is not None and reservation == granted.reservation:
                self._landed.update(landed)
            case Handoff() if granted is not None and event.reservation == granted.reservation:
                self._handoff = event

    def _check(self, instruction: Any, event: Any) -> None:
        assert not self.num_freed, "nothing follows the end"
        wanted = set(range(self._granted.first_block, NUM_BLOCKS)) if self._granted is not None else set()
        match instruction:
            case receiver.Commit(handoff):
                self.num_committed += 1
                assert self._handoff == handoff and wanted <= self._landed and not self._is_kept
            case receiver.KeepBlocks():
                assert self._is_one_sided and not self.num_committed and not self._is_kept
                self._is_kept = True
            case receiver.FreeBlocks(num_whole):
                self.num_freed += 1
                assert wanted & set(range(num_whole)) <= self._landed, "an incomplete block would be cached"
                may_free = self.num_committed or not self._is_one_sided or self._granted is None
                assert may_free or (self._is_kept and isinstance(event, receiver.SlotsSafe))


@settings(max_examples=examples(1000), deadline=None)
@given(is_granted=st.booleans(), is_one_sided=st.booleans(), events=st.lists(EVENTS, max_size=30))
def test_any_events_in_any_order_commit_what_has_landed_and_free_once(
    is_granted: bool, is_one_sided: bool, events: list[Any]
) -> None:
    machine = ReceiverHandoff(is_one_sided=is_one_sided)
    oracle = Oracle(machine, is_one_sided)
    if is_granted:
        oracle.feed(grant("r1", 1))
    for event in (*events, receiver.PrefillLost(), receiver.SlotsSafe()):
        oracle.feed(event)
    assert machine.state in (ReceiverState.RUNNING, ReceiverState.FREED)
    assert oracle.num_committed <= 1
    if machine.state is ReceiverState.RUNNING:
        assert oracle.num_committed and not oracle.num_freed
