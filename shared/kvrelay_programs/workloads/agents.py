"""An agent with tools, and a town of agents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvrelay_programs.expressions import gen
from kvrelay_programs.program import program
from kvrelay_programs.state import State
from kvrelay_programs.workloads.sentences import sentence, text
from kvrelay_programs.workloads.workload import Workload

DECISIONS = (("It matters, from 1 to 9:", " [1-9]"), ("It feels:", None), ("It does:", None))


@program
def react(s: State, instructions: str, question: str, observations: Sequence[str]) -> None:
    """Thoughts, actions and observations in turns (Yao et al., 2022)."""
    s += f"{instructions}\nQuestion: {question}\n"
    for number, observation in enumerate(observations):
        s += f"Thought {number}:" + gen(f"thought {number}", 32, stop="\n")
        s += f"\nAction {number}: search" + gen(f"action {number}", 8, regex=r" [a-z]{2,12}")
        s += f"\nObservation {number}: {observation}\n"
    s += "Answer:" + gen("answer", 16, stop="\n")


@program
def generative_agent(s: State, world: str, memories: Sequence[str], event: str) -> None:
    """An agent of a town decides what it does next (Park et al., 2023)."""
    s += f"{world}\nMemories:\n" + "\n".join(memories)
    s += f"\nNow: {event}\n"
    steps = s.fork(3)
    for step, (asked, constraint) in zip(steps, DECISIONS, strict=True):
        step += asked + gen("result", 24, stop="\n", regex=constraint)
    steps.join()


def _react(shared: random.Random, own: random.Random) -> dict[str, Any]:
    return {
        "instructions": text(shared, 400),
        "question": sentence(own, 15),
        "observations": [text(own, 40) for _ in range(4)],
    }


def _agent(shared: random.Random, own: random.Random) -> dict[str, Any]:
    return {
        "world": text(shared, 250),
        "memories": [sentence(own, 12) for _ in range(10)],
        "event": sentence(own, 12),
    }


WORKLOADS = (
    Workload("react", "instructions by all programs, the steps before by each step", react, _react),
    Workload("generative-agents", "the world by all programs, memories by each decision", generative_agent, _agent),
)
