"""What all runs of a program share at their beginning, and what a batch does with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs import Program, State, assistant, gen, program, select, system, user
from kvrelay_programs.content import Content
from kvrelay_programs.errors import EndpointError
from kvrelay_programs.graph import equal_arguments
from kvrelay_programs.workloads import Workload, find_workload, workloads
from tests.fakes.program_endpoint import FakeEndpoint

PIECES = st.lists(st.one_of(st.text("ab", max_size=3), st.sampled_from([None, 0])), max_size=6)
"""Constants, an argument (None) and a call (0)."""


@program
def pieces(s: State, parts: list[str | int | None], word: str) -> None:
    s += "Begin:"
    for part in parts:
        s += word if part is None else gen("x", 4) if part == 0 else str(part)


@given(PIECES, st.text("xy", min_size=1, max_size=3))
def test_the_prefix_is_what_stands_before_the_first_argument_or_call(parts: list[str | int | None], word: str) -> None:
    constants = "Begin:"
    for part in parts:
        if not isinstance(part, str):
            break
        constants += part
    prefix = pieces.trace(parts=parts).prefix
    assert prefix == Content(text=constants)
    state = pieces.run(parts=parts, word=word, endpoint=FakeEndpoint(), sampling={"temperature": 0})
    assert state.text().startswith(constants)


@program
def question(s: State, examples: str, asked: Any, style: str = "short") -> None:
    s += system(f"Be {style}.") + user(examples + f"\nQuestion: {asked}?") + assistant(gen("answer", 4))


def test_known_arguments_and_defaults_belong_to_the_prefix() -> None:
    trace = question.trace(examples="1, 2")
    assert [message.text for message in trace.prefix.messages] == ["Be short.", "1, 2\nQuestion: "]
    assert trace.prefix.is_open
    assert "an argument follows; 24 constant characters before" in str(trace)
    assert [message.text for message in question.trace().prefix.messages] == ["Be short.", ""]


def appended(s: State, word: Any) -> None:
    s += "a" + word


def attribute(s: State, word: Any) -> None:
    s += "a" + f"{word.text.strip()[0]}"


def message(s: State, word: Any) -> None:
    s += "a"
    s += word + "."


def branch(s: State, word: Any) -> None:
    s += "a"
    try:
        if word == "x":
            s += "b"
    except Exception:
        s += "c"


def loop(s: State, word: Any) -> None:
    s += "a"
    for each in word:
        s += each


def read(s: State, word: Any) -> None:
    s += "a"
    s["x"]


def fork(s: State, word: Any) -> None:
    s += "a"
    s.fork(2)


def choice(s: State, word: Any) -> None:
    s += "a" + select("x", [" b", " c"])


def broken(s: State, word: Any) -> None:
    s += "a"
    raise LookupError("mine")


def whole(s: State, word: Any) -> None:
    s += "a"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (appended, "an argument follows"),
        (attribute, "an argument follows"),
        (message, "an argument follows"),
        (branch, "cannot be traced on: it branches on the argument 'word'"),
        (loop, "cannot be traced on: it branches on the argument 'word'"),
        (read, "the program reads 'x'"),
        (fork, "the program uses fork of its state"),
        (choice, "the program makes its first call, 'x'"),
        (broken, "cannot be traced on: LookupError: mine"),
        (whole, "the program ends"),
    ],
)
def test_what_ends_a_trace(function: Any, reason: str) -> None:
    trace = Program(function).trace()
    assert trace.prefix == Content(text="a") and reason in trace.reason
    assert (trace.location is None) == (function is whole)
    if trace.location is not None:
        first = function.__code__.co_firstlineno
        assert trace.location.file == __file__ and first < trace.location.line < first + 8


def test_a_batch_prefetches_what_its_programs_share_before_their_first_call() -> None:
    endpoint = FakeEndpoint()
    batch = [{"examples": "1, 2", "asked": number} for number in range(3)]
    without = question.run_batch(batch, endpoint=endpoint)
    assert endpoint.prefetched == []
    with_it = question.run_batch(batch, endpoint=endpoint, prefetch=True)
    assert endpoint.prefetched == ["Be short.\n\n1, 2\nQuestion: "]
    assert [state.text() for state in with_it] == [state.text() for state in without]
    question.run_batch(batch[:1], endpoint=endpoint, prefetch=True)
    assert len(endpoint.prefetched) == 1


def test_a_refused_prefetch_does_not_end_the_batch() -> None:
    class Refusing(FakeEndpoint):
        async def prefetch(self, content: Content, caller: Any) -> None:
            raise EndpointError("status 400: no", status=400)

    states = question.run_batch([{"examples": "e", "asked": at} for at in range(2)], endpoint=Refusing(), prefetch=True)
    assert all(state["answer"] for state in states)


def test_a_default_is_not_taken_for_an_argument_that_differs() -> None:
    @program
    def with_default(s: State, style: str = "short") -> None:
        s += "In style " + style + gen("x", 4)

    endpoint = FakeEndpoint()
    with_default.run_batch([{"style": "long"}, {}], endpoint=endpoint, prefetch=True)
    assert endpoint.prefetched == ["In style "]
    with_default.run_batch([{}, {}], endpoint=endpoint, prefetch=True)
    assert endpoint.prefetched[1:] == ["In style short"]


def test_equal_arguments() -> None:
    shared = [1]
    batch: list[dict[str, Any]] = [
        {"a": "".join(["x", "y"]), "b": shared, "c": [2], "d": 1},
        {"a": "xy", "b": shared, "c": [2]},
    ]
    assert equal_arguments(batch) == {"a": "xy", "b": shared}


# -- the workloads that come with the language -----------------------------------------------------------------------


@pytest.fixture(params=list(workloads()))
def workload(request: pytest.FixtureRequest) -> Workload:
    return find_workload(request.param)


def prompts_of(workload: Workload, num_programs: int, seed: int) -> list[str]:
    endpoint = FakeEndpoint()
    workload.program.run_batch(workload.draw(num_programs, seed), endpoint=endpoint, num_threads=1, parallel=False)
    return endpoint.calls


def test_the_same_seed_gives_the_same_calls_and_another_one_others(workload: Workload) -> None:
    prompts = prompts_of(workload, 2, seed=1)
    assert prompts == prompts_of(workload, 2, seed=1)
    assert not set(prompts) & set(prompts_of(workload, 2, seed=2))


def test_programs_share_the_beginning_that_the_workload_says(workload: Workload) -> None:
    endpoint = FakeEndpoint()
    workload.program.run_batch(workload.draw(3, seed=1), endpoint=endpoint, num_threads=1)
    calls = zip(endpoint.callers, endpoint.calls, strict=True)
    firsts = {caller.session: prompt for caller, prompt in reversed(list(calls))}
    assert len(firsts) == 3
    one, other, _ = firsts.values()
    num_shared = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    if "all programs" in workload.shares or "examples" in workload.shares:
        assert num_shared > 0.3 * len(one)
    elif workload.name != "rag":  # whose documents are drawn
        assert num_shared < 100


def test_an_unknown_workload_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="no workload 'tree'; there are few-shot-5"):
        find_workload("tree")
