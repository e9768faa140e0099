"""Explicit-state search: every state that a world can reach, what holds in each, and a way out of each.

Breadth first, so that a counterexample is among the shortest. States are kept by a hash of 64 bits of their canonical
form; at a million states the chance that two of them share one is 3 in 10^8.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol


class World(Protocol):
    """One state. `steps` are what may happen in it; `after` gives the next state, this one stays as it is."""

    def steps(self) -> Iterable[tuple[Hashable, ...]]:
        """Names of steps; those whose first part is in `DISTURBANCES` need not happen."""
        ...

    def after(self, step: tuple[Hashable, ...]) -> World:
        """Raises Violation, or any error of a machine, where the step breaks a promise."""
        ...

    def key(self) -> Hashable:
        """Equal for states that behave alike."""
        ...

    def check(self) -> None:
        """Raises Violation."""
        ...

    @property
    def is_good_end(self) -> bool:
        """Everybody has an answer and nobody holds anything."""
        ...


class Violation(AssertionError):
    """A promise that does not hold in a state."""


@dataclass(eq=False)
class Counterexample(Exception):
    """How to get from the start to the trouble."""

    trouble: str
    trace: tuple[tuple[Hashable, ...], ...]

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3}. {' '.join(map(str, step))}" for number, step in enumerate(self.trace, 1))
        return f"{self.trouble}, after\n{steps}"


@dataclass(frozen=True)
class Explored:
    """What a search went through. `is_complete`: no state was left out."""

    num_states: int
    num_steps: int
    num_good_ends: int
    is_complete: bool


def explore(start: World, is_disturbance: Callable[[Hashable], bool], at_most: int = 10**9) -> Explored:
    """Visits every state. Raises Counterexample for a promise broken, or for a state without a way to a good end.

    The way out has to do without disturbances: nobody's death or change of mind may be needed to get on.
    """
    ids = {hash(start.key()): 0}
    parents = array("q", [-1])
    names: list[tuple[Hashable, ...]] = [()]
    edges_from, edges_to = array("q"), array("q")
    good: list[int] = []
    level: list[tuple[int, World]] = [(0, start)]
    num_steps, is_complete = 0, True

    def trace(number: int, *more: tuple[Hashable, ...]) -> tuple[tuple[Hashable, ...], ...]:
        path = list(reversed(more))
        while number > 0:
            path.append(names[number])
            number = parents[number]
        return tuple(reversed(path))

    while level:
        following: list[tuple[int, World]] = []
        for number, world in level:
            if world.is_good_end:
                good.append(number)
            for step in world.steps():
                num_steps += 1
                try:
                    successor = world.after(step)
                    successor.check()
                except Exception as error:
                    raise Counterexample(f"{type(error).__name__}: {error}", trace(number, step)) from error
                key = hash(successor.key())
                to = ids.get(key)
                if to is None:
                    if len(ids) >= at_most:
                        is_complete = False
                        continue
                    to = ids[key] = len(ids)
                    parents.append(number)
                    names.append(step)
                    following.append((to, successor))
                if not is_disturbance(step[0]):
                    edges_from.append(number)
                    edges_to.append(to)
        level = following
    if is_complete:
        stuck = _without_a_way(len(ids), edges_from, edges_to, good)
        if stuck is not None:
            raise Counterexample("no way leads from here to a good end", trace(stuck))
    return Explored(len(ids), num_steps, len(good), is_complete)


def _without_a_way(num_states: int, edges_from: array[int], edges_to: array[int], good: list[int]) -> int | None:
    """The first state found from which no edges lead to a good one."""
    incoming: list[list[int]] = [[] for _ in range(num_states)]
    for source, target in zip(edges_from, edges_to, strict=True):
        incoming[target].append(source)
    saved = bytearray(num_states)
    stack = list(good)
    for number in good:
        saved[number] = 1
    while stack:
        for source in incoming[stack.pop()]:
            if not saved[source]:
                saved[source] = 1
                stack.append(source)
    stuck = saved.find(0)
    return None if stuck < 0 else stuck
