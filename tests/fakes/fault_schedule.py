"""What goes wrong, where and when: by a script or by a seed; and the log of what did.

Whatever passes a point of a transport is numbered there, and the schedule says by point and number what becomes of it.
So a run can be replayed from the seed alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Point(StrEnum):
    """Where something passes: messages of a push, and the events at both ends."""

    PUSH = "push"
    PUSHED = "pushed"
    DRAINED = "drained"
    LANDED = "landed"


class Fault(StrEnum):
    """What may become of it."""

    NONE = "none"
    DELAY = "delay"
    REORDER = "reorder"
    """It waits for the next one to pass."""
    DUPLICATE = "duplicate"
    DROP = "drop"
    """Its sender believes that it arrived. A one-sided write is made, but the receiver hears nothing of it."""
    CORRUPT = "corrupt"
    """One byte of one block changes on the way, after checksums were taken."""
    STALL = "stall"
    """Nothing passes for a while."""
    DIE = "die"
    """The connection breaks, for good."""


_BENIGN = frozenset({Fault.NONE, Fault.DELAY, Fault.REORDER, Fault.STALL})
POSSIBLE: dict[Point, frozenset[Fault]] = {
    Point.PUSH: frozenset(Fault),
    # What no transport may do, because everything is built on it: report as pushed or drained what is not, or never
    # report what is. One that cannot hold this has to end its process.
    Point.PUSHED: _BENIGN,
    Point.DRAINED: (_BENIGN | {Fault.DUPLICATE}) - {Fault.REORDER},
    Point.LANDED: _BENIGN | {Fault.DUPLICATE, Fault.DIE},
}


class Schedule(Protocol):
    """Says what becomes of the `number`th that passes a point, counted from 1."""

    def fault(self, point: Point, number: int) -> Fault:
        """Must be the same for the same arguments."""
        ...


@dataclass(frozen=True)
class Script:
    """Exactly these. Raises ValueError for a fault that is not possible at its point."""

    faults: Mapping[tuple[Point, int], Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (point, _), fault in self.faults.items():
            if fault not in POSSIBLE[point]:
                raise ValueError(f"{fault} is not possible at {point}")

    def fault(self, point: Point, number: int) -> Fault:
        return self.faults.get((point, number), Fault.NONE)


@dataclass(frozen=True)
class Every:
    """The same for all that pass a point."""

    point: Point
    what: Fault

    def fault(self, point: Point, number: int) -> Fault:
        return self.what if point is self.point else Fault.NONE


@dataclass(frozen=True)
class Seeded:
    """Each fault with its share, drawn from seed, point and number alone; but none of `spared` at those points."""

    seed: int
    shares: Mapping[Fault, float]
    spared: frozenset[tuple[Point, Fault]] = frozenset()

    def fault(self, point: Point, number: int) -> Fault:
        draw = random.Random(f"{self.seed}/{point}/{number}").random()
        for fault, share in sorted(self.shares.items()):
            draw -= share
            if draw < 0:
                return fault if fault in POSSIBLE[point] and (point, fault) not in self.spared else Fault.NONE
        return Fault.NONE


BENIGN = {Fault.DELAY: 0.05, Fault.REORDER: 0.2, Fault.DUPLICATE: 0.1, Fault.STALL: 0.01}
"""With these everything arrives by itself."""


@dataclass
class Faults:
    """A schedule at work. Times in seconds."""

    schedule: Schedule = field(default_factory=Script)
    delay_s: float = 0.01
    stall_s: float = 0.05
    log: list[tuple[Point, int, Fault]] = field(default_factory=list)
    _counts: Counter[Point] = field(default_factory=Counter)

    def at(self, point: Point) -> Fault:
        self._counts[point] += 1
        fault = self.schedule.fault(point, self._counts[point])
        if fault is not Fault.NONE:
            self.log.append((point, self._counts[point], fault))
        return fault
