"""The receiver's machine alone, with any events in any order: what it commits has landed, and what it holds it frees
once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import Handoff
from kvrelay.state_machine import IllegalEvent
from kvrelay.transfer.base import Corrupted, Landed
from kvrelay_decode import receiver_events as decode
from kvrelay_decode.receiver_handoff import MAX_CORRUPTIONS, MAX_SILENT_ROUNDS, ReceiverHandoff, ReceiverState
from tests.thoroughness import examples
from tests.unit.protocol.message_strategies import values

pytestmark = pytest.mark.unit

NUM_BLOCKS = 4
names = st.sampled_from(["r1", "r1", "r1", "r2", ""])
blocks = st.lists(st.integers(-1, NUM_BLOCKS), max_size=NUM_BLOCKS).map(tuple)
handoffs = st.builds(
    lambda message, reservation, resend: msgspec.structs.replace(message, reservation=reservation, resend=resend),
    values(Handoff),
    names,
    st.integers(0, MAX_SILENT_ROUNDS + NUM_BLOCKS * MAX_CORRUPTIONS),
)
EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Landed, names, blocks),
    st.builds(Landed, names, blocks),
    st.builds(Corrupted, names, blocks),
    st.builds(decode.HandoffReceived, handoffs),
    st.builds(decode.HandoffReceived, handoffs),
    st.builds(decode.HandoffOverdue),
    st.builds(decode.ReservationOpened, names, st.integers(0, NUM_BLOCKS), st.just(NUM_BLOCKS), st.booleans()),
    st.sampled_from([decode.WritesDrained(), decode.HandoffAborted(), decode.PrefillLost()]),
    st.sampled_from([decode.TransferStalled("slow"), decode.ReceiveCancelled("left"), decode.AdoptionRefused("no")]),
)
OWN_MISTAKES = (decode.ReservationOpened, decode.AdoptionRefused, decode.WritesDrained, Landed, Corrupted)
"""Events that this worker itself makes, and never in a state in which they are illegal. All others come from peers."""


class Oracle:
    """What arrived, and what may be done about it."""

    def __init__(self, machine: ReceiverHandoff) -> None:
        self._machine = machine
        self._landed: set[int] = set()
        self._opened: decode.ReservationOpened | None = None
        self._handoff: Handoff | None = None
        self._num_resends = 0
        self._is_quarantined = False
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
        opened = self._opened
        match event:
            case decode.ReservationOpened():
                self._opened = event
            case Landed(reservation, landed) if opened is not None and reservation == opened.reservation:
                self._landed.update(landed)
            case decode.HandoffReceived(message) if opened is not None and message.reservation == opened.reservation:
                self._handoff = message

    def _check(self, instruction: Any, event: Any) -> None:
        assert self._opened is not None
        assert not self.num_freed, "nothing follows the end"
        granted = set(range(self._opened.first_block, NUM_BLOCKS))
        match instruction:
            case decode.Commit(handoff):
                self.num_committed += 1
                assert self._handoff == handoff and granted <= self._landed and not self._is_quarantined
                assert not self._opened.needs_quarantine or handoff.resend >= self._num_resends, "writes are under way"
            case decode.QuarantineBlocks():
                assert self._opened.needs_quarantine and not self.num_committed and not self._is_quarantined
                self._is_quarantined = True
            case decode.FreeBlocks(num_whole):
                self.num_freed += 1
                assert granted & set(range(num_whole)) <= self._landed, "an incomplete block would be cached"
                may_free = self.num_committed or not self._opened.needs_quarantine
                assert may_free or (self._is_quarantined and isinstance(event, decode.WritesDrained))
            case decode.RecheckBlocks(_, doubted):
                assert self._opened.needs_quarantine and set(doubted) <= granted & self._landed
                self._landed -= set(doubted)
            case decode.SendResend(_, wanted, number, _):
                self._num_resends += 1
                assert number == self._num_resends and set(wanted) <= granted - self._landed
                assert wanted or self._opened.needs_quarantine


@example(  # asked again while a repeated block is compared
    is_opened=True,
    one_sided=True,
    events=[
        Landed("r1", (1,)),
        Corrupted("r1", (2,)),
        Landed("r1", (2, 3)),
        decode.HandoffReceived(
            Handoff(reservation="r1", index=0, token_id=1, num_tokens=16, num_blocks=3, cached_tokens=0, resend=1)
        ),
        decode.HandoffOverdue(),
        Landed("r1", (2,)),
    ],
)
@settings(max_examples=examples(1000), deadline=None)
@given(is_opened=st.booleans(), one_sided=st.booleans(), events=st.lists(EVENTS, max_size=30))
def test_any_events_in_any_order_commit_what_has_landed_and_free_once(
    is_opened: bool, one_sided: bool, events: list[Any]
) -> None:
    machine = ReceiverHandoff()
    oracle = Oracle(machine)
    if is_opened:
        oracle.feed(decode.ReservationOpened("r1", 1, NUM_BLOCKS, one_sided))
    for event in events:
        oracle.feed(event)
        assert machine.num_silent_rounds <= MAX_SILENT_ROUNDS
    for event in (decode.PrefillLost(), decode.WritesDrained()):
        oracle.feed(event)
    assert machine.state in (ReceiverState.RUNNING, ReceiverState.FREED)
    assert oracle.num_committed <= 1
    if machine.state is ReceiverState.RUNNING:
        assert oracle.num_committed and not oracle.num_freed
