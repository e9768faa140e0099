"""Chats of four turns, with short and with long answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvrelay_programs.expressions import assistant, gen, user
from kvrelay_programs.program import program
from kvrelay_programs.state import State
from kvrelay_programs.workloads.sentences import text
from kvrelay_programs.workloads.workload import Workload

WORDS_PER_TOKEN = 0.75


@program
def multi_turn(s: State, turns: Sequence[tuple[str, int]]) -> None:
    """Each turn is a message and the length of its answer in tokens."""
    for number, (message, num_tokens) in enumerate(turns):
        s += user(message)
        s += assistant(gen(f"answer {number}", num_tokens, ignore_eos=True))


def _multi_turn(name: str, shortest: int, longest: int) -> Workload:
    def arguments(shared: random.Random, own: random.Random) -> dict[str, Any]:
        return {
            "turns": [
                (text(own, round(WORDS_PER_TOKEN * own.randint(256, 512))), own.randint(shortest, longest))
                for _ in range(4)
            ]
        }

    return Workload(name, "the turns before, by each turn", multi_turn, arguments)


WORKLOADS = (_multi_turn("multi-turn-short", 4, 8), _multi_turn("multi-turn-long", 256, 512))
