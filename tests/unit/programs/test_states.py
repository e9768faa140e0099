"""What programs wait for, how they fail, and what they refuse."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import nullcontext
from typing import Any

import pytest

from kvrelay_programs import (
    DeadlineExceeded,
    ProgramCancelled,
    ProgramError,
    State,
    gen,
    program,
    select,
)
from kvrelay_programs.endpoint import Caller
from kvrelay_programs.errors import caller_location
from kvrelay_programs.program_loop import program_loop
from kvrelay_programs.run import Run, RunOptions
from tests.fakes.program_endpoint import FakeEndpoint
from tests.fakes.waiting import PATIENCE_S


def here(offset: int = 0) -> str:
    """The caller's line, as errors name it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"test_states.py:{frame.f_back.f_lineno + offset}"


def closed_gate(endpoint: FakeEndpoint) -> asyncio.Event:
    async def make() -> asyncio.Event:
        return asyncio.Event()

    endpoint.gate = asyncio.run_coroutine_threadsafe(make(), program_loop()).result()
    return endpoint.gate


def test_forks_run_at_the_same_time_and_the_program_waits_only_for_what_it_reads() -> None:
    endpoint = FakeEndpoint()
    gate = closed_gate(endpoint)
    seen = threading.Event()

    @program
    def three(s: State) -> list[str]:
        s += "Say"
        forks = s.fork(3)
        for number, fork in enumerate(forks):
            fork += f" {number}:"
            fork += gen("word", 4)
        seen.set()
        return [fork["word"] for fork in forks]

    state = three.run(endpoint=endpoint, stream=True)
    assert seen.wait(30) and endpoint.three_run.wait(30)
    program_loop().call_soon_threadsafe(gate.set)
    assert "".join(state.text_iter()) == "Say"
    assert endpoint.most_running == 3
    assert len(state.result) == 3 and endpoint.prefetched == ["Say"]
    assert len({caller.session for caller in endpoint.callers}) == 1


def test_without_parallel_calls_one_runs_at_a_time() -> None:
    endpoint = FakeEndpoint()

    @program
    def two(s: State) -> None:
        s += "Say"
        for fork in (forks := s.fork(2)):
            fork += gen("word", 4)
        forks.join()

    two.run(endpoint=endpoint, parallel=False, fork_hint=False)
    assert (endpoint.most_running, endpoint.prefetched) == (1, [])


def test_a_failed_call_names_the_line_and_fails_what_follows_it() -> None:
    endpoint = FakeEndpoint()
    endpoint.fails_on = "bad"
    lines: list[str] = []

    @program
    def failing(s: State) -> None:
        s += "bad"
        s += gen("first", 4)
        lines.append(here(-1))
        s += gen("second", 4)
        with pytest.raises(ProgramError, match="this text is refused") as caught:
            s["second"]
        assert str(caught.value).startswith(f"{lines[0]}: gen('first'): status 400")

    failing.run(endpoint=endpoint)  # the program has handled it
    assert endpoint.calls == ["bad"]


def test_an_error_that_the_program_does_not_read_is_raised_by_run() -> None:
    endpoint = FakeEndpoint()
    endpoint.fails_on = "bad"

    @program
    def failing(s: State) -> None:
        s += "bad" + gen("first", 4)

    with pytest.raises(ProgramError, match=r"gen\('first'\)"):
        failing.run(endpoint=endpoint)
    with pytest.raises(ProgramError, match=r"gen\('first'\)"):
        list(failing.run(endpoint=endpoint, stream=True).text_iter())


def test_an_error_of_the_program_ends_its_calls() -> None:
    endpoint = FakeEndpoint()
    closed_gate(endpoint)

    @program
    def wrong(s: State) -> None:
        s += "Say" + gen("word", 4)
        assert endpoint.began.wait(30)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        wrong.run(endpoint=endpoint)
    assert endpoint.was_cancelled.wait(30)
    with pytest.raises(ProgramError, match="LookupError: mine"):
        list(wrong.run(endpoint=endpoint, stream=True).text_iter())


def test_a_cancelled_program_raises_where_it_waits() -> None:
    endpoint = FakeEndpoint()
    closed_gate(endpoint)
    errors: list[BaseException] = []

    @program
    def endless(s: State) -> None:
        s += "Say" + gen("word", 4)
        try:
            s["word"]
        except ProgramError as error:
            errors.append(error)
            raise

    state = endless.run(endpoint=endpoint, stream=True)
    assert endpoint.began.wait(30)
    state.cancel()
    state.cancel()
    with pytest.raises(ProgramCancelled):
        list(state.text_iter())
    assert [type(error) for error in errors] == [ProgramCancelled] and endpoint.was_cancelled.wait(30)


def test_a_cancelled_program_ends_before_its_first_step_and_after_its_last() -> None:
    for num_steps in range(4):
        run = Run(FakeEndpoint(), RunOptions(), None)
        state = State(run)

        async def cancel_between(run: Run = run, state: State = state, num_steps: int = num_steps) -> None:
            state += "Say" + gen("word", 4)
            run.cancel()
            for _ in range(num_steps):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(cancel_between(), program_loop()).result(30)
        with pytest.raises(ProgramCancelled):
            state.value("word")


def test_a_deadline_ends_a_call_and_is_told_to_the_endpoint() -> None:
    endpoint = FakeEndpoint()
    closed_gate(endpoint)

    @program
    def endless(s: State) -> None:
        s += "Say" + gen("word", 4)

    with pytest.raises(DeadlineExceeded, match=r"gen\('word'\) was not complete"):
        endless.run(endpoint=endpoint, deadline_s=0.05)
    left = endpoint.callers[0].time_left_s
    assert left is not None and 0 < left <= 0.05


def test_a_fork_whose_calls_nobody_waits_for_is_refused() -> None:
    @program
    def wrong(s: State) -> None:
        s += "Say"
        for fork in s.fork(2):
            fork += gen("word", 4)

    with pytest.raises(ProgramError, match=r"left without a join.*'word'"):
        wrong.run(endpoint=FakeEndpoint())


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    @program
    def greeting(s: State, name: str) -> None:
        s += f"Hello {name}" + gen("x", 4)

    endpoint = FakeEndpoint()
    with pytest.raises(TypeError, match="greeting: missing a required argument: 'name'"):
        greeting.run(endpoint=endpoint)
    with pytest.raises(TypeError, match=r"greeting: .*'name'"):
        greeting.run_batch([{"name": "a"}, {"nam": "b"}], endpoint=endpoint)
    assert not endpoint.calls
    with pytest.raises(TypeError, match=r"run\(\) has its own model"):
        program(lambda s, model: None)


def test_a_batch_keeps_the_order_and_can_keep_errors() -> None:
    @program
    def greeting(s: State, name: str) -> None:
        s += f"Hello {name}" + gen("x", 4)

    endpoint = FakeEndpoint()
    endpoint.fails_on = "bad"
    names = [{"name": name} for name in ("a", "bad", "c")]
    states = greeting.run_batch(names, endpoint=endpoint, on_error="keep", num_threads=2)
    assert [state.error is None for state in states] == [True, False, True]
    assert states[2].text().startswith("Hello c ")
    with pytest.raises(ProgramError, match="this text is refused"):
        greeting.run_batch(names, endpoint=endpoint)


def test_locations_are_of_the_program() -> None:
    assert str(caller_location()) == here()


def test_a_cancelled_run_ends_the_states_that_waited_for_another_one() -> None:
    class Slow(FakeEndpoint):
        """A cancelled call ends later, as one does that closes its connection."""

        async def _call(self, text: str, caller: Caller) -> None:
            try:
                await super()._call(text, caller)
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)

    endpoint = Slow()
    closed_gate(endpoint)
    failures: list[type[Exception]] = []

    @program
    def waiting(s: State) -> None:
        s += "Say" + gen("first", 4)
        s.fork(2)
        s += gen("second", 4)
        assert endpoint.began.wait(30)
        s.cancel()
        for _ in range(2):
            with pytest.raises(ProgramCancelled):
                s["second"]
            with pytest.raises(ProgramCancelled):
                s.text()
            failures.append(ProgramCancelled)

    waiting.run(endpoint=endpoint, deadline_s=60)
    assert len(failures) == 2


def test_a_call_that_does_not_end_at_the_deadline_does_not_hold_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay_programs.run.CANCELLATION_S", 0.05)
    may_end = threading.Event()

    class Deaf(FakeEndpoint):
        """Its calls cannot be cancelled."""

        async def generate(self, *_: Any) -> Any:
            while not may_end.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

    @program
    def reading(s: State) -> None:
        s += "x" + gen("y", 4)
        s["y"]

    @program
    def leaving(s: State) -> None:
        s += "x" + gen("y", 4)

    try:
        for each in (reading, leaving):
            with pytest.raises(DeadlineExceeded, match="has not ended after the deadline"):
                each.run(endpoint=Deaf(), deadline_s=0.05)
    finally:
        may_end.set()


def test_a_streamed_program_that_exits_ends_its_text() -> None:
    @program
    def exiting(s: State) -> None:
        s += "x"
        raise SystemExit(3)

    with pytest.raises(ProgramError, match="SystemExit: 3"):
        list(exiting.run(endpoint=FakeEndpoint(), stream=True).text_iter())


def test_wrong_values_and_unknown_names_name_the_line() -> None:
    lines: list[str] = []

    @program
    def wrong(s: State) -> None:
        lines.append(here(1))
        s += select("x", [])

    @program
    def unknown(s: State) -> None:
        lines.append(here(1))
        s["nothing"]

    with pytest.raises(ValueError, match="choices must be a list") as value_error:
        wrong.run(endpoint=FakeEndpoint())
    with pytest.raises(KeyError, match="its values: none so far") as key_error:
        unknown.run(endpoint=FakeEndpoint())
    assert [error.value.args[0].split(": ")[0] for error in (value_error, key_error)] == lines


def test_a_state_shows_itself_without_waiting() -> None:
    endpoint = FakeEndpoint()
    endpoint.fails_on = "bad"
    shown: list[str] = []

    @program
    def showing(s: State) -> None:
        s += "<b>" + gen("good", 4)
        s["good"]
        s += "bad" + gen("wrong", 4)
        with pytest.raises(ProgramError):
            s["wrong"]
        gate = closed_gate(endpoint)
        other = State(s._run)
        other += "x" + gen("late", 4)
        shown.extend((repr(s), s._repr_html_(), repr(other)))
        program_loop().call_soon_threadsafe(gate.set)

    showing.run(endpoint=endpoint)
    words, page, other = shown
    assert "'good': '" in words and "'wrong': failed" in words
    assert "&lt;b&gt;" in page and "<td>wrong</td><td>failed</td>" in page
    assert other.endswith("values: 'late': pending>")


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_program_ends_its_session(fails: bool) -> None:
    endpoint = FakeEndpoint()

    @program
    def ends(s: State) -> None:
        s += "a" + gen("b", 4)
        s.value("b")
        if fails:
            raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails") if fails else nullcontext():
        ends.run(endpoint=endpoint)
    assert endpoint.session_ended.wait(PATIENCE_S)
    assert endpoint.ended_sessions == [endpoint.callers[0].session]


def test_extend_appends_and_returns_the_state() -> None:
    @program
    def extended(s: State) -> list[str]:
        return [fork.extend(f"{number}:").extend(gen("a", 4))["a"] for number, fork in enumerate(s.extend("x").fork(2))]

    endpoint = FakeEndpoint()
    state = extended.run(endpoint=endpoint)
    assert endpoint.calls == ["x0:", "x1:"] and len(state.result) == 2

    @program
    def wrong(s: State) -> None:
        s.extend(gen("a", 4))

    with pytest.raises(ProgramError, match=f"{here(-2)}: gen.'a'. behind no text"):
        wrong.run(endpoint=endpoint)
