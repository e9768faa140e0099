"""Answers by several lines of thought: a tree, a skeleton, samples that vote, and a judge in branches."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from kvrelay_programs.expressions import gen, select
from kvrelay_programs.program import program
from kvrelay_programs.state import State
from kvrelay_programs.workloads.sentences import text
from kvrelay_programs.workloads.workload import Workload

NUM_BRANCHES = 3
NUM_POINTS = 5
NUM_SAMPLES = 8
DIMENSIONS = ("clarity", "order", "evidence", "tone")


@program
def tree_of_thought(s: State, task: str) -> list[str]:
    """Plans, each carried out in several ways, each of which is graded (Yao et al., 2023)."""
    s += f"Task: {task}\n"
    plans = s.fork(NUM_BRANCHES)
    answers: list[tuple[State, str]] = []
    for number, plan in enumerate(plans):
        plan += f"Plan {number + 1}:" + gen("plan", 48, temperature=0.8, seed=number)
    for plan in plans:
        ways = plan.fork(NUM_BRANCHES)
        for number, way in enumerate(ways):
            way += f"\nSolution {number + 1}:" + gen("solution", 64, temperature=0.8, seed=number)
            way += "\nThe solution is" + select("grade", [" bad.", " fair.", " good."])
        answers += [(way, "grade") for way in ways]
    plans.join()
    return [way[name] for way, name in answers]


@program
def skeleton_of_thought(s: State, question: str) -> None:
    """Short points, all of which are worked out at the same time (Ning et al., 2024)."""
    s += f"Question: {question}\nSkeleton of the answer, in {NUM_POINTS} short points:"
    s += gen("skeleton", 64)
    points = s.fork(NUM_POINTS)
    for number, point in enumerate(points):
        point += f"\nPoint {number + 1} in full:" + gen("text", 64)
    points.join(append=True)
    s += "\nSummary:" + gen("summary", 32)


@program
def self_consistency(s: State, examples: str, question: str) -> str:
    """The most frequent of several sampled answers (Wang et al., 2023)."""
    s += examples + question + "\nThought:"
    thoughts = s.fork(NUM_SAMPLES)
    for number, thought in enumerate(thoughts):
        thought += gen("thought", 48, temperature=0.7, seed=number)
        thought += "\nAnswer:" + gen("answer", choices=[" A", " B", " C", " D"])
    return Counter(thought["answer"] for thought in thoughts).most_common(1)[0][0]


@program
def judge(s: State, essay: str) -> None:
    """Judged by several criteria at the same time, then merged (Saha et al., 2023)."""
    s += f"Essay: {essay}\n"
    parts = s.fork(len(DIMENSIONS))
    for part, dimension in zip(parts, DIMENSIONS, strict=True):
        part += f"Judged by its {dimension}:" + gen("judgement", 64)
    parts.join(append=True)
    s += "\nSummary:" + gen("summary", 48)
    s += "\nGrade:" + select("grade", [" poor.", " fair.", " good.", " excellent."])


def _task(field: str, num_words: int) -> Any:
    return lambda shared, own: {field: text(own, num_words)}


def _consistency(shared: random.Random, own: random.Random) -> dict[str, Any]:
    examples = "".join(f"{text(shared, 60)}\nAnswer: {shared.choice('ABCD')}\n\n" for _ in range(5))
    return {"examples": examples, "question": text(own, 40)}


WORKLOADS = (
    Workload("tree-of-thought", "the task and each plan, by branches", tree_of_thought, _task("task", 120)),
    Workload("skeleton-of-thought", "the skeleton, by its points", skeleton_of_thought, _task("question", 60)),
    Workload("self-consistency", "5 examples and the question, by samples", self_consistency, _consistency),
    Workload("judge", "the essay, by criteria", judge, _task("essay", 300)),
)
