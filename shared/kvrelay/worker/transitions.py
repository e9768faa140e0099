"""What the state machines of a handoff share: transitions stand in a table, and one that does not raises."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)


class IllegalTransition(Exception):
    """An event that cannot happen in this state. Nothing was changed."""


def moved(table: Mapping[State, AbstractSet[State]], state: State, to: State) -> State:
    """`to`, where the table leads there from `state`. Raises IllegalTransition."""
    if to not in table[state]:
        raise IllegalTransition(f"{state} > {to}")
    return to
