"""The shape of every state machine here: `handle(event)` returns instructions, and a table holds the transitions.

A machine does no I/O and reads no clock. Its owner feeds it events and carries out the instructions in order, so a
recorded list of events replays to the same instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

InstructionT = TypeVar("InstructionT")

Transition: TypeAlias = Callable[..., list[InstructionT]]
"""A method of the machine, called with the machine and the event. It must raise before it changes anything."""

TransitionTable: TypeAlias = dict[tuple[StrEnum, type[Any]], Transition[InstructionT]]


class IllegalEvent(Exception):
    """The event cannot happen in the machine's present state. The machine has not changed."""


def transition_table(
    rows: Mapping[StrEnum, Mapping[type[Any], Transition[InstructionT]]],
) -> TransitionTable[InstructionT]:
    """Flattens one row per state. A pair of state and event that is missing is illegal."""
    return {(state, event): transition for state, row in rows.items() for event, transition in row.items()}


def find_transition(table: TransitionTable[InstructionT], state: StrEnum, event: object) -> Transition[InstructionT]:
    """Raises IllegalEvent if the table has no entry for this state and the event's class."""
    transition = table.get((state, type(event)))
    if transition is None:
        raise IllegalEvent(f"{type(event).__name__} in state {state}")
    return transition
