"""The transition tables of all three state machines: what they lack is illegal and changes nothing."""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Any

import pytest

from kvrelay.handoff import receiver as decode
from kvrelay.handoff import sender as prefill
from kvrelay.handoff.receiver import ReceiverHandoff, ReceiverState
from kvrelay.handoff.sender import SenderHandoff, SenderState
from kvrelay.handoff.transports.base import Corrupted, Landed, SenderDrained, TransferFailed
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Committed,
    Granted,
    Handoff,
    PeerRef,
    Reassign,
    Refused,
    Released,
)
from kvrelay.state_machine import IllegalEvent, TransitionTable
from kvrelay_router.dispatch import attempt
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from kvrelay_router.dispatch.events import FromWorker
from scripts import docs
from tests.unit.handoff.check.values import clone, freeze

R, D = PeerRef("r", "1", "tcp://r"), PeerRef("d", "1", "tcp://d")
GRANT = Granted(reservation="r", first_block=0, slots=[5], transport="t", endpoints=[{}])
CACHED = Granted(reservation="r", first_block=1, slots=[], transport="t", endpoints=[{}])
HANDOFF = Handoff(reservation="r", index=0, token_id=1, num_tokens=1, num_blocks=1)

SENDER_EVENTS: list[prefill.SenderHandoffEvent] = [
    prefill.PrefillScheduled((1,)),
    prefill.BlocksComputed(1),
    prefill.PrefillFinished(HANDOFF),
    prefill.PrefillFinished(None),
    prefill.FromDecode(D, GRANT),
    prefill.FromDecode(D, Refused(reason="full")),
    prefill.FromDecode(D, Released(reservation="r", reason="full")),
    prefill.FromDecode(D, Committed(reservation="r")),
    prefill.DecodeLost(D, "silent"),
    Reassign(decode=D),
    Cancel(reason="the client is gone"),
    SenderDrained("r"),
    TransferFailed("r", "broken"),
]
RECEIVER_EVENTS: list[decode.ReceiverHandoffEvent] = [
    GRANT,
    Landed("r", (0,)),
    Corrupted("r", (0,)),
    HANDOFF,
    decode.BlocksOverdue("nothing came"),
    Abort(reservation="r", reason="no"),
    Cancel(reason="the client is gone"),
    decode.PrefillLost(),
    decode.SlotsSafe(),
    decode.CommitRefused("full"),
]


def class_of(event: object) -> type[object]:
    """The one that the table knows an event by."""
    return type(event.body) if isinstance(event, prefill.FromDecode) else type(event)


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
                if (before.state, class_of(event)) not in table:
                    with pytest.raises(IllegalEvent, match=class_of(event).__name__):
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
    changes = explore(SenderHandoff(R, D), prefill.TRANSITIONS, SENDER_EVENTS, depth=5)
    assert changes == set(docs.SENDER_LABELS)


def test_a_receiver_changes_its_state_as_the_diagram_says_and_raises_for_what_its_table_lacks() -> None:
    changes = set()
    for is_one_sided in (True, False):
        for events in (RECEIVER_EVENTS, [CACHED, *RECEIVER_EVENTS[1:]]):
            machine = ReceiverHandoff(is_one_sided=is_one_sided)
            changes |= explore(machine, decode.TRANSITIONS, events, depth=4)
    assert changes == set(docs.RECEIVER_LABELS)


@pytest.mark.parametrize(
    ("table", "states", "machine"),
    [
        (prefill.TRANSITIONS, SenderState, SenderHandoff),
        (decode.TRANSITIONS, ReceiverState, ReceiverHandoff),
        (attempt.TRANSITIONS, AttemptState, SequenceAttempts),
    ],
    ids=["sender", "receiver", "attempts"],
)
def test_a_table_names_all_states_and_exactly_the_events_of_handle(
    table: TransitionTable[Any], states: type[StrEnum], machine: Any
) -> None:
    assert {state for state, _ in table} == set(states)
    events = set(typing.get_args(typing.get_type_hints(machine.handle)["event"]))
    for from_peer in events & {prefill.FromDecode, FromWorker}:
        events |= set(typing.get_args(typing.get_type_hints(from_peer)["body"]))
        events.remove(from_peer)
    assert {event for _, event in table} == events


def test_messages_of_peers_are_legal_in_every_state_and_own_events_where_they_are_caused() -> None:
    senders = prefill.TRANSITIONS
    for message in SENDER_EVENTS[4:11]:
        assert legal_states(senders, class_of(message)) == set(SenderState)
    assert legal_states(senders, prefill.PrefillScheduled) == {SenderState.QUEUED}
    assert legal_states(senders, prefill.BlocksComputed) == {SenderState.COMPUTING}
    assert legal_states(senders, prefill.PrefillFinished) == {SenderState.COMPUTING}
    for own in (SenderDrained, TransferFailed):
        assert legal_states(senders, own) == set(SenderState) - {SenderState.QUEUED}
    receivers = decode.TRANSITIONS
    for received in (Handoff, Abort, Cancel, decode.PrefillLost):
        assert legal_states(receivers, received) == set(ReceiverState)
    assert legal_states(receivers, Granted) == {ReceiverState.ASKED}
    assert legal_states(receivers, decode.CommitRefused) == {ReceiverState.RUNNING}


@pytest.mark.parametrize("event", SENDER_EVENTS, ids=lambda event: type(event).__name__)
def test_a_released_sender_stays_released_whatever_comes(event: prefill.SenderHandoffEvent) -> None:
    machine = SenderHandoff.released(R)
    if (SenderState.RELEASED, class_of(event)) in prefill.TRANSITIONS:
        machine.handle(event)
    assert machine.state is SenderState.RELEASED
