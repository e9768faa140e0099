"""Random programs give what a slow interpreter gives that does one thing after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs import State, gen, program, select
from kvrelay_programs.scoring import best_choice
from tests.fakes.program_endpoint import FakeEndpoint, answer_to, scores_of

NAMES = ("a", "b", "c")
CHOICES = (" yes", " no", " perhaps")


@dataclass(frozen=True)
class Step:
    """`kind` is text, gen, select, read or fork. A fork's `children` are the steps of each of its states, which begin
    with `common` text and, if it `samples`, a call of each.
    """

    kind: str
    text: str = ""
    children: Sequence[Sequence[Step]] = ()
    append: bool = False
    common: str = ""
    samples: bool = False


@dataclass
class Slow:
    """The oracle's state."""

    text: str
    values: dict[str, str] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.kind == "text":
                self.text += step.text
            elif step.kind == "gen":
                self._bring(step.text, answer_to(self.text, {"max_tokens": 5, "temperature": 0}))
            elif step.kind == "select":
                chosen = best_choice(CHOICES, scores_of(self.text, CHOICES), by_tokens=True).text
                self._bring(step.text, chosen)
            elif step.kind == "read":
                self.reads.append(self.values.get(step.text, "none"))
            else:
                self._fork(step)

    def _bring(self, name: str, text: str) -> None:
        self.values[name] = text
        self.text += text

    def _fork(self, step: Step) -> None:
        begin = self.text
        for steps in step.children:
            child = Slow(begin + step.common, dict(self.values), self.reads)
            if step.samples:
                child.take([Step("gen", "a")])
            child.take(steps)
            if step.append:
                self.text += child.text[len(begin) :]


def steps(depth: int) -> st.SearchStrategy[list[Step]]:
    simple = st.one_of(
        st.builds(Step, st.just("text"), st.text("xy \n", min_size=1, max_size=5)),
        st.builds(Step, st.just("gen"), st.sampled_from(NAMES)),
        st.builds(Step, st.just("select"), st.sampled_from(NAMES)),
        st.builds(Step, st.just("read"), st.sampled_from(NAMES)),
    )
    if depth == 0:
        return st.lists(simple, max_size=5)
    fork = st.builds(
        Step,
        st.just("fork"),
        children=st.lists(steps(depth - 1), min_size=1, max_size=3),
        append=st.booleans(),
        common=st.sampled_from(["", "z", "long " * 20]),
        samples=st.booleans(),
    )
    return st.lists(st.one_of(simple, simple, fork), max_size=6)


def take(state: State, program_steps: Sequence[Step], reads: list[str]) -> None:
    for step in program_steps:
        if step.kind == "text":
            state += step.text
        elif step.kind == "gen":
            state += gen(step.text, 5)
        elif step.kind == "select":
            state += select(step.text, CHOICES)
        elif step.kind == "read":
            reads.append(value_or_none(state, step.text))
        else:
            forks = state.fork(len(step.children))
            if step.common and step.samples:
                forks += step.common + gen("a", 5)
            elif step.common:
                forks += step.common
            elif step.samples:
                forks += gen("a", 5)
            for child, child_steps in zip(forks, step.children, strict=True):
                take(child, child_steps, reads)
            forks.join(append=step.append)


def value_or_none(state: State, name: str) -> str:
    try:
        return state[name]
    except KeyError:
        return "none"


@program
def random_program(s: State, program_steps: Sequence[Step], reads: list[str]) -> None:
    s += "Begin:"
    take(s, program_steps, reads)


@given(steps(2), st.booleans(), st.booleans(), st.booleans())
def test_a_program_gives_what_a_slow_interpreter_gives(
    program_steps: list[Step], parallel: bool, stream: bool, fork_hint: bool
) -> None:
    reads: list[str] = []
    state = random_program.run(
        program_steps=program_steps,
        reads=reads,
        endpoint=FakeEndpoint(),
        sampling={"temperature": 0},
        parallel=parallel,
        stream=stream,
        fork_hint=fork_hint,
    )
    pieces = "".join(state.text_iter()) if stream else None
    slow = Slow("Begin:")
    slow.take(program_steps)
    assert state.text() == slow.text
    assert reads == slow.reads
    assert {name: state[name] for name in slow.values} == slow.values
    if not any(step.kind == "fork" and step.append for step in program_steps):
        assert pieces is None or pieces == slow.text
