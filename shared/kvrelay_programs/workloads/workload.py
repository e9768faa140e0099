"""What a workload is."""

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
