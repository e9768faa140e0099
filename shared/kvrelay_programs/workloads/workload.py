"""The workloads by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay_programs.program import Program


@dataclass(frozen=True, slots=True)
class Workload:
    """`arguments(shared, own)` gives those of one program: `shared` draws the same values for all programs of a run,
    and `own` different ones for each. `shares` says what programs or their calls have in common.
    """

    name: str
    shares: str
    program: Program
    arguments: Callable[[random.Random, random.Random], dict[str, Any]]

    def draw(self, num_programs: int, seed: int) -> list[dict[str, Any]]:
        """Arguments of this many programs, the same for the same seed."""
        return [
            self.arguments(random.Random(f"{seed}-{self.name}"), random.Random(f"{seed}-{self.name}-{number}"))
            for number in range(num_programs)
        ]


def workloads() -> dict[str, Workload]:
    """All workloads, in the order of the docs."""
    from kvrelay_programs.workloads import agents, chat, choice, documents, thought

    modules = (choice, chat, thought, agents, documents)
    return {workload.name: workload for module in modules for workload in module.WORKLOADS}


def find_workload(name: str) -> Workload:
    """Raises ValueError, which lists the names."""
    known = workloads()
    if name not in known:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(known)}")
    return known[name]
