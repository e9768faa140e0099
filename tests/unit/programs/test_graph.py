"""Programs as graphs, and what a compiled run has computed for forks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs import (
    Program,
    State,
    assistant,
    gen,
    program,
    select,
    user,
)
from kvrelay_programs.content import Content, Message
from kvrelay_programs.endpoint import Caller
from tests.fakes.program_endpoint import FakeEndpoint
from tests.unit.programs.test_random_programs import Step, random_program, steps

RULES = "Be strict, and give reasons. "


@program
def judged(s: State, essay: str, topic: str = "style") -> None:
    s += f"Essay: {essay}\n"
    parts = s.fork(3)
    for part, criterion in zip(parts, ("order", "tone", "evidence"), strict=True):
        part += RULES + f"The {topic} of its {criterion}:" + gen("grade", 4)
    parts.join(append=True)
    s += "Summary:" + gen("summary", 4)


def test_a_compiled_run_computes_what_all_forks_begin_with() -> None:
    interpreted, compiled = FakeEndpoint(), FakeEndpoint()
    without = judged.run(essay="long", endpoint=interpreted)
    with_it = judged.run(essay="long", endpoint=compiled, compiled=True)
    assert with_it.text() == without.text()
    assert sorted(compiled.calls) == sorted(interpreted.calls)
    assert interpreted.prefetched == ["Essay: long\n"]
    assert compiled.prefetched == ["Essay: long\n" + RULES + "The style of its"]


def test_a_compiled_batch_knows_the_arguments_that_are_equal() -> None:
    for topics, common in ((("style", "style"), "The style of its"), (("style", "idea"), "The ")):
        endpoint = FakeEndpoint()
        batch: list[dict[str, Any]] = [{"essay": f"{number}", "topic": topic} for number, topic in enumerate(topics)]
        states = judged.run_batch(batch, endpoint=endpoint, compiled=True)
        assert sorted(endpoint.prefetched) == ["Essay: ", *(f"Essay: {at}\n{RULES}{common}" for at in range(2))]
        for state, each in zip(states, batch, strict=True):
            assert state.text() == judged.run(endpoint=FakeEndpoint(), **each).text()


def test_messages_of_forks() -> None:
    @program
    def chat(s: State, facts: str) -> None:
        s += user(facts) + assistant("Yes.")
        for number, child in enumerate(s.fork(2)):
            with child.user():
                child += f"{RULES}Question"
                child += f" {number}?"
            child += assistant(gen("answer", 4))
            assert child["answer"]

    graph = chat.graph()
    assert graph.beginnings == {}  # the second state has not begun where a value is tested
    assert "branches on the value \"s['answer']\"" in str(graph)

    @program
    def all_asked(s: State, facts: str) -> None:
        s += user(facts) + assistant("Yes.")
        forks = s.fork(2)
        for number, child in enumerate(forks):
            child += user(f"{RULES}Question {number}?") + assistant(gen("answer", 4))
        forks.join()

    endpoint = FakeEndpoint()
    contents: list[Content] = []

    async def prefetch(content: Content, caller: Any) -> None:
        contents.append(content)

    endpoint.prefetch = prefetch  # type: ignore[method-assign]
    all_asked.run(facts="f", endpoint=endpoint, compiled=True)
    begun = Message("user", (f"{RULES}Question",))
    assert contents == [
        Content(messages=(Message("user", ("f",)), Message("assistant", ("Yes.",)), begun), is_open=True)
    ]


@program
def branching(s: State, kind: str) -> None:
    s += "a" + gen("x", 4)
    if kind == "b":
        s += "b"


@program
def reading(s: State) -> None:
    s += "a" + gen("x", 4)
    s += f"again {s['x']}" + select("y", ["b", "c"])
    if s["y"] == "b":
        s += "d"


@program
def failing(s: State) -> None:
    s += "a"
    s += str(s["unknown"])


@pytest.mark.parametrize(
    ("each", "reason", "last"),
    [
        (branching, "it branches on the argument 'kind'", "x"),
        (reading, "it branches on the value \"s['y']\"", "y"),
        (failing, "KeyError", "a"),
    ],
)
def test_a_graph_ends_where_a_value_decides(each: Program, reason: str, last: str) -> None:
    graph = each.graph()
    assert graph.reason is not None and reason in graph.reason
    assert last in str(graph.steps[-1])
    assert graph.location is not None and graph.location.file == __file__
    lines = str(graph).splitlines()
    assert lines[-1].startswith(f"{graph.location}: ") and lines[-1].endswith("interpreted from here on")
    if each is not failing:
        known: dict[str, Any] = {"kind": "b"} if each is branching else {}
        texts = [each.run(endpoint=FakeEndpoint(), compiled=flag, **known).text() for flag in (True, False)]
        assert texts[0] == texts[1]


def test_a_whole_graph_as_text() -> None:
    assert judged.graph(essay="e").reason is None
    lines = [line.strip() for line in str(judged.graph(essay="e")).splitlines()]
    assert lines[0] == r"Text(text='Essay: e\n')"
    assert [line for line in lines if line.startswith(("fork", "state", "Joined"))] == [
        f"fork at test_graph.py:{judged.__wrapped__.__code__.co_firstlineno + 3}",  # type: ignore[attr-defined]
        *("state 0", "state 1", "state 2", "Joined(append=True)"),
    ]


@given(steps(2), st.booleans())
def test_compiled_random_programs_give_what_interpreted_ones_give(program_steps: list[Step], as_batch: bool) -> None:
    def run(**options: Any) -> tuple[str, list[str]]:
        reads: list[str] = []
        arguments: dict[str, Any] = {"program_steps": program_steps, "reads": reads}
        endpoint = FakeEndpoint()
        if as_batch:
            (state,) = random_program.run_batch([arguments], endpoint=endpoint, progress=False, **options)
        else:
            state = random_program.run(endpoint=endpoint, **arguments, **options)
        return state.text(), reads

    text, reads = run()
    compiled_text, compiled_reads = run(compiled=True)
    assert compiled_text == text
    assert compiled_reads[len(compiled_reads) - len(reads) :] == reads  # behind those of the trace


def test_a_wrong_beginning_costs_no_answer() -> None:
    flips = iter([True, True, True, False, False, False])

    @program
    def random(s: State) -> None:
        s += "a"
        forks = s.fork(2)
        for child in forks:
            child += ("first " if next(flips) else "second ") * 3 + gen("x", 4)
        forks.join(append=True)

    check: Callable[..., State] = random.run
    endpoint = FakeEndpoint()
    state = check(endpoint=endpoint, compiled=True)  # traced with two flips, run with two others
    assert state.text().count("a") >= 1 and len(endpoint.calls) == 2
    assert endpoint.prefetched == ["afirst first first "]


# -- text that all forks begin with ------------------------------------------------------------------------------------


LONG = "Answer as a careful reader of all that has been said so far would. "


class KeepsOrder(FakeEndpoint):
    """`order` has prefetched texts, and a call as None."""

    least_prefetch_chars = len("Begin. ")

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str | None] = []

    async def prefetch(self, content: Content, caller: Caller) -> None:
        for _ in range(20):  # calls that do not wait come before it
            await asyncio.sleep(0)
        self.order.append(content.whole_text)

    async def _call(self, text: str, caller: Caller) -> None:
        self.order.append(None)
        await super()._call(text, caller)


@pytest.mark.parametrize("fork_hint", [True, False])
def test_text_that_all_forks_begin_with_is_computed_before_their_calls(fork_hint: bool) -> None:
    @program
    def forked(s: State) -> None:
        s += "Begin. "
        forks = s.fork(3)
        forks += LONG + gen("a", 4)
        forks += LONG + gen("b", 4)  # behind different answers
        forks.join()

    endpoint = KeepsOrder()
    state = forked.run(endpoint=endpoint, fork_hint=fork_hint)
    assert state.text() == "Begin. "
    assert endpoint.order == [*(["Begin. ", "Begin. " + LONG] if fork_hint else []), *[None] * 6]


@pytest.mark.parametrize("differs", ["text", "short", "later"])
def test_text_behind_what_differs_is_not_computed_for_all(differs: str) -> None:
    @program
    def forked(s: State) -> None:
        s += "Begin. "
        forks = s.fork(2)
        if differs == "text":
            forks[1] += "Other. "
        forks += (LONG if differs != "short" else "Go. ") + (gen("a", 4) if differs != "later" else "")
        if differs == "later":
            forks[0] += "x"
            forks += LONG + gen("a", 4)
        forks.join()

    endpoint = KeepsOrder()
    forked.run(endpoint=endpoint)
    prefetched = [each for each in endpoint.order if each is not None]
    assert prefetched == ["Begin. ", *(["Begin. " + LONG] if differs == "later" else [])]


def test_text_of_an_earlier_call_is_not_computed_again_before_a_fork() -> None:
    @program
    def asks(s: State, text: str, question: str) -> None:
        s += text + question
        forks = s.fork(2)
        forks += gen("a", 4)
        forks.join()

    endpoint = KeepsOrder()
    for text, question, is_new in ((LONG, "Why?", True), (LONG, "How?", False), (LONG, "How many rivers?", True)):
        endpoint.order.clear()
        asks.run(text=text, question=question, endpoint=endpoint)
        assert endpoint.order == [*([text + question] if is_new else []), None, None], question
