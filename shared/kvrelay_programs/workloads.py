"""Programs with the shapes of published workloads (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", 2024, section 6 and appendix C). Their texts are random sentences, so any model can run them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay_programs.expressions import assistant, gen, select, user
from kvrelay_programs.program import Program, program
from kvrelay_programs.state import State


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


# -- random sentences of common words; a word and its space are one to two tokens of most tokenizers

_TEXT = """
water river stone bird night day sea wind tree leaf house road hand eye child friend story song market city
field horse winter summer light shadow garden letter window door table bread salt fire ship island mountain
valley forest path bridge old new small large quiet bright cold warm long short near far early late open green
white dark soft hard slow quick clear deep high low walks sings finds keeps brings turns holds sees hears
opens carries builds follows leaves meets writes reads draws grows falls rests waits begins ends moves
"""
WORDS = _TEXT.split()


def sentence(draw: random.Random, num_words: int) -> str:
    """A sentence of that many words, at least two."""
    words = draw.choices(WORDS, k=max(2, num_words))
    return f"{' '.join(words).capitalize()}."


def text(draw: random.Random, num_words: int) -> str:
    """Sentences of 8 to 16 words, `num_words` in all."""
    sentences: list[str] = []
    while num_words > 0:
        length = min(num_words, draw.randint(8, 16))
        sentences.append(sentence(draw, length))
        num_words -= length
    return " ".join(sentences)


# -- questions with four choices, behind examples that all programs share (the shape of MMLU and HellaSwag)


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


# -- chats of four turns, with short and with long answers

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


# -- answers by several lines of thought: a tree, a skeleton, samples that vote, a judge in branches

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


# -- an agent with tools, and a town of agents

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


# -- answers from documents, and facts from documents as JSON

NUM_DOCUMENTS = 12
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "house": {"enum": ["north", "south", "east", "west"]},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "house", "year_of_birth", "is_alive"],
    "additionalProperties": False,
}


@program
def retrieval(s: State, documents: str, question: str) -> None:
    """A question behind the documents that a search has found."""
    s += f"{documents}\nQuestion: {question}\nAnswer:" + gen("answer", 48)


@program
def json_extraction(s: State, document: str) -> None:
    """Facts of a document by a schema."""
    s += f"{document}\nThe facts as JSON: " + gen("facts", 120, json_schema=SCHEMA)


def _retrieval(shared: random.Random, own: random.Random) -> dict[str, Any]:
    store = [text(shared, 200) for _ in range(NUM_DOCUMENTS)]
    weights = [1 / (1 + rank) for rank in range(NUM_DOCUMENTS)]  # some are found more often, and the best comes first
    found = sorted(set(own.choices(range(NUM_DOCUMENTS), weights, k=3)))
    return {"documents": "\n\n".join(store[number] for number in found), "question": sentence(own, 12)}


def _json(shared: random.Random, own: random.Random) -> dict[str, Any]:
    return {"document": text(own, 150)}


_WORKLOADS = (
    _few_shot(5),
    _few_shot(20),
    Workload("select-20", "20 examples, and a question by its endings", likely_ending, _likely_ending),
    _multi_turn("multi-turn-short", 4, 8),
    _multi_turn("multi-turn-long", 256, 512),
    Workload("tree-of-thought", "the task and each plan, by branches", tree_of_thought, _task("task", 120)),
    Workload("skeleton-of-thought", "the skeleton, by its points", skeleton_of_thought, _task("question", 60)),
    Workload("self-consistency", "5 examples and the question, by samples", self_consistency, _consistency),
    Workload("judge", "the essay, by criteria", judge, _task("essay", 300)),
    Workload("react", "instructions by all programs, the steps before by each step", react, _react),
    Workload("generative-agents", "the world by all programs, memories by each decision", generative_agent, _agent),
    Workload("rag", "popular documents, by programs", retrieval, _retrieval),
    Workload("json", "nothing but the schema", json_extraction, _json),
)


def workloads() -> dict[str, Workload]:
    """All workloads, in the order of the docs."""
    return {workload.name: workload for workload in _WORKLOADS}


def find_workload(name: str) -> Workload:
    """Raises ValueError, which lists the names."""
    known = workloads()
    if name not in known:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(known)}")
    return known[name]
