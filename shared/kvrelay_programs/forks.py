"""States that begin with the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from kvrelay_programs.content import Content
from kvrelay_programs.errors import Location, ProgramError
from kvrelay_programs.expressions import Expression, parts_of

if TYPE_CHECKING:
    from kvrelay_programs.state import State


class Forks(Sequence["State"]):
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
