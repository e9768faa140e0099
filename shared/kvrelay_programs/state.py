"""The state of a program: text that grows by constants and by calls, whose values are read by name.

Appending never waits. A state makes its calls in order; states run at the same time. Reading a value waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from html import escape
from typing import Any, TypeVar, overload

from kvrelay_programs.content import Content
from kvrelay_programs.errors import Location, ProgramError, caller_location, wrong_value
from kvrelay_programs.expressions import Block, Expression, Gen, MessageBlocks, Part, Role, Select, parts_of
from kvrelay_programs.interpreter import Interpreter
from kvrelay_programs.results import Generated, Selected, TextFeed, Usage, Value
from kvrelay_programs.run import Run

ReadT = TypeVar("ReadT")


class State(MessageBlocks):
    """Made by a program's run and by `fork`. One thread at a time may use it. `result` is what the program
    returned, `error` what ended it in a batch that keeps errors, and `elapsed_s` how long it ran.
    """

    def __init__(self, run: Run, parent: State | None = None) -> None:
        self.result: Any = None
        self.error: ProgramError | None = None
        self.elapsed_s: float | None = None
        self._run = run
        self._values: dict[str, Value] = {} if parent is None else dict(parent._values)
        self._feed = TextFeed() if run.options.stream else None
        self._interpreter = Interpreter.begin(run, self._feed)
        self._forks: list[Forks] = []
        self._num_steps = 0
        self._has_calls = False
        self._is_read = False

    def __iadd__(self, other: str | Expression) -> State:
        location = caller_location()
        for part in parts_of(other):
            self._append(part, location)
        return self

    def extend(self, other: str | Expression) -> State:
        """Appends as `+=` does, where an expression is needed. Returns this state."""
        self += other
        return self

    def __getitem__(self, name: str) -> str:
        """The text of a value, once it is complete. Raises KeyError for an unknown name, ProgramError if it failed."""
        return self.value(name).text

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def value(self, name: str) -> Generated | Selected:
        """A value with its finish reason, usage and scores. Waits and raises as `state[name]` does."""
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "none so far"
            raise KeyError(f"{caller_location()}: no value {name!r} was asked for in this state; its values: {known}")
        self._is_read = True
        return self._result_of(self._values[name].result)

    def __repr__(self) -> str:
        values = ", ".join(f"{name!r}: {value}" for name, value in self._values.items())
        return f"<State of {self._interpreter.content_so_far.num_chars} characters; values: {values or 'none'}>"

    def _repr_html_(self) -> str:
        """For notebooks: the text so far, and the values. Does not wait."""
        text = escape(self._interpreter.content_so_far.whole_text)
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in self._values.items()
        )
        return f'<pre style="white-space: pre-wrap">{text}</pre><table>{rows}</table>'

    @property
    def usage(self) -> Usage:
        """Calls and tokens of the whole run so far."""
        return self._run.usage

    def text(self) -> str:
        """All text so far, with a blank line between messages. Waits for the calls in it."""
        return self._content().whole_text

    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, in the form of a chat request. Waits for the calls in them."""
        return [message.as_json for message in self._content().messages]

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text as it arrives, from its beginning: all of it, or that of one value. Needs `run(stream=True)`."""
        if self._feed is None:
            raise ProgramError("text_iter needs run(stream=True)", caller_location())
        self._is_read = True
        return (text for owner, text in self._feed.pieces() if name is None or owner == name)

    def fork(self, num: int = 2) -> Forks:
        """`num` states that begin with the text of this one, and go on at the same time. Does not wait."""
        if num < 1:
            raise wrong_value("a fork needs at least one state")
        location = caller_location()
        if self._run.options.fork_hint:
            beginning = self._run.options.beginnings.get(location, ())
            self._interpreter.announce_fork(num, location, beginning)
        forks = Forks(self, [State(self._run, self) for _ in range(num)], location)
        self._forks.append(forks)
        return forks

    def copy(self) -> State:
        """A fork of one."""
        return self.fork(1)[0]

    def cancel(self) -> None:
        """Ends all calls of the whole run."""
        self._run.cancel()

    def end_session(self) -> None:
        """The program has ended."""
        self._run.end_session()

    def end(self, error: ProgramError | None = None) -> None:
        """Ends the text of this state and its forks. Readers of them get `error`."""
        if self._feed is not None:
            self._feed.complete(error)
        for forks in self._forks:
            for child in forks:
                child.end(error)

    def _block(self, role: Role) -> Iterator[None]:
        self._num_steps += 1
        self._interpreter.open(role, caller_location())
        try:
            yield
        finally:
            self._interpreter.close()

    def _append(self, part: Part, location: Location) -> None:
        self._num_steps += 1
        if isinstance(part, Block):
            self._interpreter.open(part.role, part.location)
            for inner in part.parts:
                self._append(inner, location)
            self._interpreter.close()
        elif isinstance(part, Gen | Select):
            self._has_calls, self._is_read = True, False
            value = self._values[part.name] = Value()
            self._interpreter.call(part, value)
            if not self._run.options.parallel:
                self._result_of(value.result)
        else:
            self._interpreter.add(part, location)

    def _content(self) -> Content:
        self._is_read = True
        return self._result_of(self._interpreter.snapshot())

    def _result_of(self, future: Future[ReadT]) -> ReadT:
        try:
            return self._run.wait(future)
        except ProgramError as error:
            self._run.handled.add(error)
            raise


class Forks(Sequence[State]):
    """The states of a fork, in their order. `+=` appends to each; text with which it begins belongs to their common
    prefix, which the endpoint computes once before their calls.
    """

    def __init__(self, parent: State, states: list[State], location: Location) -> None:
        self.location = location
        self._parent = parent
        self._states = states
        self._num_common_steps = 0  # as long as every state has taken just these, their texts are the same
        self._begin = parent._interpreter.snapshot()
        for state in states:
            state._interpreter.inherit(self._begin)

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> list[State]: ...
    def __getitem__(self, index: int | slice) -> State | list[State]:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """Allows `forks[0] += ...`, which puts back the same state."""
        if state is not self._states[index]:
            raise TypeError("the states of a fork cannot be replaced")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __iadd__(self, other: str | Expression) -> Forks:
        parts = parts_of(other)
        num_constant = next((at for at, part in enumerate(parts) if not isinstance(part, str)), len(parts))
        are_equal = all(state._num_steps == self._num_common_steps for state in self._states)
        for state in self._states:
            state += Expression(parts[:num_constant])
        if are_equal:
            self._num_common_steps += num_constant
            self._announce()
        for state in self._states:
            state += Expression(parts[num_constant:])
        return self

    def _announce(self) -> None:
        """The text of all states has grown. If that is much, the first one has the endpoint compute it before the calls
        of any."""
        if not self._parent._run.options.fork_hint:
            return
        first, *others = self._states
        first._interpreter.announce_fork(len(self._states), self.location)
        computed = first._interpreter.snapshot()
        for state in others:
            state._interpreter.wait_for([computed], lambda _: "")

    def join(self, *, append: bool = False) -> None:
        """The calls that follow in the parent begin when all of these states are complete. `append` adds to it what
        they have appended since the fork, in their order. Does not wait.
        """
        for state in self._states:
            state._is_read = True
        ends = [state._interpreter.snapshot() for state in self._states]
        begin, location = self._begin, self.location

        def text(contents: list[Content]) -> str:
            return "".join(_behind(begin.result(), content, location) for content in contents) if append else ""

        self._parent._interpreter.wait_for(ends, text)


def _behind(begin: Content, end: Content, location: Location) -> str:
    if len(end.messages) > len(begin.messages):
        raise ProgramError("join(append=True) of states with new messages; read their values instead", location)
    return end.whole_text[len(begin.whole_text) :]


def check_forks(state: State) -> None:
    """Raises ProgramError if a fork makes calls whose end is not awaited."""
    for forks in state._forks:
        for child in forks:
            if child._has_calls and not child._is_read:
                names = ", ".join(map(repr, child._values))
                raise ProgramError(
                    f"a fork was left without a join, and its last values are not read (it has {names})", forks.location
                )
            check_forks(child)


def wait_for_calls(state: State) -> None:
    """Waits until a state and its forks have made their calls. Raises ProgramError for errors that no read raised."""
    for forks in state._forks:
        for child in forks:
            wait_for_calls(child)
    try:
        state._run.wait(state._interpreter.snapshot())
    except ProgramError as error:
        if error not in state._run.handled:
            raise
