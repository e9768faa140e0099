"""The steps of a program as a graph, and the prefix that all its runs share. Both are found by running the program with
arguments and values that are not known.

The graph says with what text all states of a fork begin, wherever the program appends it. A compiled run has the
endpoint compute that text with the prefix of the fork, before the calls that share it. Nothing else changes: a wrong
graph, as of a program with random choices, costs computed text that is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from kvrelay_programs.content import Content
from kvrelay_programs.errors import Location, ProgramError, caller_location, is_of_package
from kvrelay_programs.expressions import (
    MARK,
    Argument,
    Block,
    Expression,
    Gen,
    MessageBlocks,
    Part,
    Role,
    Select,
    TraceEnded,
    parts_of,
)


@dataclass(frozen=True, slots=True)
class Trace:
    """`prefix` is constant in all runs. `reason` says what ended it, at `location` (None: the program's end)."""

    prefix: Content
    reason: str
    location: Location | None

    def __str__(self) -> str:
        where = "" if self.location is None else f"{self.location}: "
        return f"{where}{self.reason}; {self.prefix.num_chars} constant characters before"


def trace(function: Callable[..., Any], signature: inspect.Signature, known: Mapping[str, Any]) -> Trace:
    """Runs `function` up to its first call, fork, read, or use of an argument that is neither in `known` nor has a
    default. An exception of the program ends the trace, too.
    """
    graph = graph_of(function, with_unknown(signature, known), _GraphState(only_prefix=True))
    return Trace(graph.prefix, graph.reason or "the program ends", graph.location)


def with_unknown(signature: inspect.Signature, known: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a program, with those that are not known and have no default as an `Argument`."""
    keywords = dict(known)
    for name, parameter in list(signature.parameters.items())[1:]:
        is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_plain and name not in keywords and parameter.default is parameter.empty:
            keywords[name] = Argument(name)
    return keywords


def equal_arguments(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments that are one object, or the same text, in all of a batch."""
    first, *others = batch
    return {
        name: value
        for name, value in first.items()
        if all(name in each and _same(each[name], value) for each in others)
    }


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, str) and isinstance(other, str) and one == other)


def batch_arguments(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all programs of a batch know: equal arguments, and the others as unknown, also those with a default."""
    unknown = {name: Argument(name) for each in batch for name in each}
    return unknown | equal_arguments(batch)


def line_of(error: Exception) -> Location | None:
    """The innermost line outside of this package."""
    location, frame = None, error.__traceback__
    while frame is not None:
        if not is_of_package(frame.tb_frame.f_code.co_filename):
            location = Location(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        frame = frame.tb_next
    return location


@dataclass(frozen=True, slots=True)
class Text:
    """A constant. Constants that follow each other are one."""

    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """An argument, a value, an image or a video."""


@dataclass(frozen=True, slots=True)
class Call:
    """A `gen` or a `select`."""

    name: str
    location: Location


@dataclass(frozen=True, slots=True)
class Opened:
    """A message begins."""

    role: Role


@dataclass(frozen=True, slots=True)
class Closed:
    """A message ends."""


@dataclass(frozen=True, slots=True)
class Forked:
    """States begin that go on with these steps."""

    location: Location
    children: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The state waits for those of the fork before."""

    append: bool


Step = Text | Unknown | Call | Opened | Closed | Forked | Joined
Beginnings = Mapping[Location, tuple[Step, ...]]


@dataclass(frozen=True, slots=True)
class Graph:
    """Steps up to the end of the program, or up to what cannot be traced: then `reason` and `location` say why."""

    steps: tuple[Step, ...]
    reason: str | None = None
    location: Location | None = None

    @property
    def prefix(self) -> Content:
        """The text and media before the first call, fork or argument."""
        return applied(Content(), self.steps, None)

    @property
    def beginnings(self) -> Beginnings:
        """The constant steps with which all states begin that are forked at a line; lines without any are left out."""
        children: dict[Location, list[tuple[Step, ...]]] = {}
        _collect(self.steps, children)
        found = {location: _common(each) for location, each in children.items()}
        return {location: steps for location, steps in found.items() if steps}

    def __str__(self) -> str:
        lines = list(_lines(self.steps, ""))
        if self.reason is not None:
            lines.append(f"{self.location}: {self.reason}; interpreted from here on")
        return "\n".join(lines)


def graph_of(program: Any, known: Mapping[str, Any], state: _GraphState | None = None) -> Graph:
    """Runs a function over a state with `known` arguments up to the first thing that depends on an unknown value. An
    exception of the program ends the trace, too."""
    state = state or _GraphState()
    try:
        program(state, **known)
    except TraceEnded as end:
        return Graph(state.steps, end.reason, end.location)
    except Exception as error:
        return Graph(state.steps, f"it cannot be traced on: {type(error).__name__}: {error}", line_of(error))
    return Graph(state.steps)


def applied(content: Content, steps: Sequence[Step], location: Location | None) -> Content:
    """`content` with the steps before the first one that is not constant, or that cannot stand there."""
    for step in steps:
        try:
            if isinstance(step, Text):
                content = content.added(step.text, location)
            elif isinstance(step, Opened):
                content = content.opened(step.role, location or Location("", 0))
            elif isinstance(step, Closed):
                content = content.closed()
            else:
                break
        except ProgramError:  # the program's own step raises it
            break
    return content


def _common(children: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The longest constant beginning of all."""
    found: list[Step] = []
    for steps in zip(*children, strict=False):
        texts = [step.text for step in steps if isinstance(step, Text)]
        if isinstance(steps[0], Text | Opened | Closed) and all(step == steps[0] for step in steps):
            found.append(steps[0])
            continue
        # A tokenizer may put the last space into the next word.
        if len(texts) == len(steps) and (text := _common_text(texts).rstrip()):
            found.append(Text(text))
        break
    return tuple(found)


def _common_text(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((at for at, char in enumerate(first) if char != last[at]), len(first))
    return first[:length]


def _collect(steps: Sequence[Step], children: dict[Location, list[tuple[Step, ...]]]) -> None:
    for step in steps:
        if isinstance(step, Forked):
            children.setdefault(step.location, []).extend(step.children)
            for child in step.children:
                _collect(child, children)


def _lines(steps: Sequence[Step], indent: str) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Forked):
            yield f"{indent}fork at {step.location}"
            for number, child in enumerate(step.children):
                yield f"{indent}  state {number}"
                yield from _lines(child, indent + "    ")
        else:
            yield f"{indent}{step}"


class _GraphState(MessageBlocks):
    """Takes the place of a state. Values are arguments that are not known. With `only_prefix` all that is more than
    appending constants ends the trace."""

    def __init__(self, names: frozenset[str] = frozenset(), *, only_prefix: bool = False) -> None:
        self._steps: list[Step | _GraphForks] = []
        self._names = set(names)
        self._only_prefix = only_prefix

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps so far, with those of forks."""
        return tuple(step.step if isinstance(step, _GraphForks) else step for step in self._steps)

    def __iadd__(self, other: str | Expression) -> _GraphState:
        location = caller_location()
        for part in parts_of(other):
            self._append(part, location)
        return self

    def extend(self, other: str | Expression) -> _GraphState:
        self += other
        return self

    def _beyond_prefix(self, reason: str, location: Location | None = None) -> None:
        if self._only_prefix:
            raise TraceEnded(reason, location or caller_location())

    def __getitem__(self, name: str) -> Argument:
        return self.value(name)

    def __contains__(self, name: object) -> bool:
        self._beyond_prefix(f"the program looks for {name!r}")
        return name in self._names

    def value(self, name: str) -> Argument:
        self._beyond_prefix(f"the program reads {name!r}")
        if name not in self._names:
            raise KeyError(name)
        return Argument(f"s[{name!r}]", "value")

    def text(self) -> Argument:
        self._beyond_prefix("the program uses text of its state")
        return Argument("s.text()", "value")

    def messages(self) -> Argument:
        self._beyond_prefix("the program uses messages of its state")
        return Argument("s.messages()", "value")

    def __getattr__(self, name: str) -> Any:
        raise TraceEnded(f"the program uses {name} of its state", caller_location())

    def fork(self, num: int = 2) -> _GraphForks:
        self._beyond_prefix("the program uses fork of its state")
        forks = _GraphForks(self, num, caller_location())
        self._steps.append(forks)
        return forks

    def copy(self) -> _GraphState:
        (state,) = self.fork(1)
        return state

    def names(self) -> frozenset[str]:
        """Values that a fork knows."""
        return frozenset(self._names)

    def joined(self, *, append: bool) -> None:
        self._steps.append(Joined(append))

    def _block(self, role: Role) -> Iterator[None]:
        self._steps.append(Opened(role))
        try:
            yield
        except Exception:  # of the program, which may catch it; the end of a trace leaves the block as it is
            self._steps.append(Closed())
            raise
        self._steps.append(Closed())

    def _append(self, part: Part, location: Location) -> None:
        if isinstance(part, Block):
            self._steps.append(Opened(part.role))
            for inner in part.parts:
                self._append(inner, location)
            self._steps.append(Closed())
        elif isinstance(part, Gen | Select):
            self._beyond_prefix(f"the program makes its first call, {part.name!r}", part.location)
            self._names.add(part.name)
            self._steps.append(Call(part.name, part.location))
        elif isinstance(part, str):
            self._append_text(part, location)
        else:
            self._beyond_prefix("an image or a video follows", location)
            self._steps.append(Unknown())

    def _append_text(self, text: str, location: Location) -> None:
        for number, constant in enumerate(text.split(MARK)):
            if number:
                self._beyond_prefix("an argument follows", location)
                self._steps.append(Unknown())
            last = self._steps[-1] if self._steps else None
            if constant and isinstance(last, Text):
                self._steps[-1] = Text(last.text + constant)
            elif constant:
                self._steps.append(Text(constant))


class _GraphForks(Sequence[_GraphState]):
    """Takes the place of forks."""

    def __init__(self, parent: _GraphState, num: int, location: Location) -> None:
        self._parent, self._location = parent, location
        self._states = [_GraphState(parent.names()) for _ in range(num)]

    @property
    def step(self) -> Forked:
        return Forked(self._location, tuple(state.steps for state in self._states))

    @overload
    def __getitem__(self, index: int) -> _GraphState: ...
    @overload
    def __getitem__(self, index: slice) -> list[_GraphState]: ...
    def __getitem__(self, index: int | slice) -> _GraphState | list[_GraphState]:
        return self._states[index]

    def __setitem__(self, index: int, state: _GraphState) -> None:
        """Allows `forks[0] += ...`."""

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(self, other: str | Expression) -> _GraphForks:
        for state in self._states:
            state += other
        return self

    def join(self, *, append: bool = False) -> None:
        self._parent.joined(append=append)
