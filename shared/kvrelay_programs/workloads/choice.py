"""Questions with four choices, behind 5 or 20 examples that all programs share (the shape of MMLU and HellaSwag)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvrelay_programs.expressions import gen, select
from kvrelay_programs.program import program
from kvrelay_programs.state import State
from kvrelay_programs.workloads.sentences import sentence, text
from kvrelay_programs.workloads.workload import Workload


@program
def few_shot(s: State, examples: str, question: str) -> None:
    """Answers a question with one of four letters."""
    s += examples + question
    s += "\nAnswer:" + gen("answer", 1)


@program
def likely_ending(s: State, examples: str, question: str, endings: Sequence[str]) -> None:
    """Selects the most likely of four endings."""
    s += examples + question + select("ending", endings)


def _question(draw: random.Random) -> str:
    choices = "".join(f"\n{letter}. {sentence(draw, 6)}" for letter in "ABCD")
    return f"Question: {text(draw, 30)}{choices}"


def _few_shot(num_examples: int) -> Workload:
    def arguments(shared: random.Random, own: random.Random) -> dict[str, Any]:
        examples = [f"{_question(shared)}\nAnswer: {shared.choice('ABCD')}\n\n" for _ in range(num_examples)]
        return {"examples": "".join(examples), "question": _question(own)}

    return Workload(f"few-shot-{num_examples}", f"{num_examples} examples, by all programs", few_shot, arguments)


def _likely_ending(shared: random.Random, own: random.Random) -> dict[str, Any]:
    examples = "".join(f"{text(shared, 40)}\n\n" for _ in range(20))
    return {"examples": examples, "question": text(own, 30), "endings": [f" {sentence(own, 12)}" for _ in range(4)]}


WORKLOADS = (
    _few_shot(5),
    _few_shot(20),
    Workload("select-20", "20 examples, and a question by its endings", likely_ending, _likely_ending),
)
