"""The transition tables of all three state machines: what they lack is illegal and changes nothing."""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Any

import pytest

from kvrelay.protocol.messages import FirstToken, Granted, Handoff, PeerRef
from kvrelay.state_machine import IllegalEvent, TransitionTable
from kvrelay.transfer.base import Corrupted, Landed, Pushed, SenderDrained, TransferFailed
from kvrelay_decode import receiver_events as decode
from kvrelay_decode import receiver_handoff
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState
from kvrelay_prefill import sender_events as prefill
from kvrelay_prefill import sender_handoff
from kvrelay_prefill.sender_handoff import SenderHandoff, SenderState
from kvrelay_router.dispatch import attempt
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from scripts import docs
from tests.unit.handoff.check.values import clone, freeze

pytestmark = pytest.mark.unit

D = PeerRef("d", "1", "tcp://d")
GRANT = Granted(reservation="r", first_block=0, slots=[5], transport="t", endpoint={})
HANDOFF = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=1)
FIRST = FirstToken(index=0, token_id=1)

SENDER_EVENTS: list[prefill.SenderHandoffEvent] = [
    prefill.PrefillScheduled((1,)),
    prefill.BlocksComputed(1),
    prefill.PrefillFinished(FIRST),
    prefill.ReservationGranted(D, GRANT),
    prefill.ReservationDeferred(D),
    prefill.ReservationRefused(D, "full"),
    prefill.ReservationReleased(D, "r", "full"),
    prefill.HandoffCommitted("r"),
    prefill.ResendRequested("r", (0,), 1),
    prefill.DecodeLost(D, "silent"),
    prefill.DecodeReassigned(D),
    prefill.SendCancelled("the client is gone"),
    Pushed("r", (0,), 1),
    SenderDrained("r"),
    TransferFailed("r", "broken"),
]
RECEIVER_EVENTS: list[decode.ReceiverHandoffEvent] = [
    decode.ReservationOpened("r", 0, 1, needs_quarantine=True),
    Landed("r", (0,)),
    Corrupted("r", (0,)),
    decode.HandoffReceived(HANDOFF),
    decode.HandoffOverdue(),
    decode.TransferStalled("nothing came"),
    decode.HandoffAborted(),
    decode.ReceiveCancelled("the client is gone"),
    decode.PrefillLost(),
    decode.WritesDrained(),
    decode.AdoptionRefused("full"),
]
COPIED_EVENTS = [decode.ReservationOpened("r", 0, 1, needs_quarantine=False), *RECEIVER_EVENTS[1:]]
CACHED_EVENTS = [decode.ReservationOpened("r", 1, 1, needs_quarantine=True), *RECEIVER_EVENTS[1:]]


def legal_states(table: TransitionTable[Any], event: type[object]) -> set[StrEnum]:
    return {state for state, class_ in table if class_ is event}


def explore(machine: Any, table: TransitionTable[Any], events: list[Any], depth: int) -> set[tuple[StrEnum, StrEnum]]:
    """Feeds all events to every state of the machine that `depth` events can reach, and returns the changes of state.

    An event that the table lacks must raise and change nothing.
    """
    changes: set[tuple[StrEnum, StrEnum]] = set()
    level, seen = [machine], {freeze(clone(machine))}
    for _ in range(depth):
        following = []
        for before in level:
            for event in events:
                after = clone(before)
                if (before.state, type(event)) not in table:
                    with pytest.raises(IllegalEvent, match=type(event).__name__):
                        after.handle(event)
                    assert freeze(after) == freeze(clone(before))
                    continue
                after.handle(event)
                if after.state is not before.state:
                    changes.add((before.state, after.state))
                frozen = freeze(clone(after))
                if frozen not in seen:
                    seen.add(frozen)
                    following.append(after)
        level = following
    return changes


def test_a_sender_changes_its_state_as_the_diagram_says_and_raises_for_what_its_table_lacks() -> None:
    changes = explore(SenderHandoff(D), sender_handoff.TRANSITIONS, SENDER_EVENTS, depth=5)
    assert changes == set(docs.SENDER_LABELS)


def test_a_receiver_changes_its_state_as_the_diagram_says_and_raises_for_what_its_table_lacks() -> None:
    changes = set()
    for events in (RECEIVER_EVENTS, COPIED_EVENTS, CACHED_EVENTS):
        changes |= explore(ReceiverHandoff(), receiver_handoff.TRANSITIONS, events, depth=4)
    assert changes == set(docs.RECEIVER_LABELS)


@pytest.mark.parametrize(
    ("table", "states", "machine"),
    [
        (sender_handoff.TRANSITIONS, SenderState, SenderHandoff),
        (receiver_handoff.TRANSITIONS, ReceiverState, ReceiverHandoff),
        (attempt.TRANSITIONS, AttemptState, SequenceAttempts),
    ],
    ids=["sender", "receiver", "attempts"],
)
def test_a_table_names_all_states_and_exactly_the_events_of_handle(
    table: TransitionTable[Any], states: type[StrEnum], machine: Any
) -> None:
    assert {state for state, _ in table} == set(states)
    assert {event for _, event in table} == set(typing.get_args(typing.get_type_hints(machine.handle)["event"]))


def test_messages_of_peers_are_legal_in_every_state_and_own_events_where_they_are_caused() -> None:
    senders = sender_handoff.TRANSITIONS
    for message in SENDER_EVENTS[3:12]:
        assert legal_states(senders, type(message)) == set(SenderState)
    assert legal_states(senders, prefill.PrefillScheduled) == {SenderState.QUEUED}
    assert legal_states(senders, prefill.BlocksComputed) == {SenderState.COMPUTING}
    assert legal_states(senders, prefill.PrefillFinished) == {SenderState.COMPUTING}
    for own in (Pushed, SenderDrained, TransferFailed):
        assert legal_states(senders, own) == set(SenderState) - {SenderState.QUEUED}
    receivers = receiver_handoff.TRANSITIONS
    for received in RECEIVER_EVENTS[3:8]:
        assert legal_states(receivers, type(received)) == set(ReceiverState)
    assert legal_states(receivers, decode.ReservationOpened) == {ReceiverState.ASKED}
    assert legal_states(receivers, decode.AdoptionRefused) == {ReceiverState.RUNNING}


@pytest.mark.parametrize("event", SENDER_EVENTS, ids=lambda event: type(event).__name__)
def test_a_released_sender_stays_released_whatever_comes(event: prefill.SenderHandoffEvent) -> None:
    machine = SenderHandoff(D)
    machine.handle(prefill.SendCancelled(""))
    if (SenderState.RELEASED, type(event)) in sender_handoff.TRANSITIONS:
        machine.handle(event)
    assert machine.state is SenderState.RELEASED
