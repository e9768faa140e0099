"""The beginning that all runs of a program share, found by running it with arguments whose values are not known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvrelay_programs.argument import MARK, Argument, TraceEnded
from kvrelay_programs.content import Content
from kvrelay_programs.errors import Location, caller_location, is_of_package
from kvrelay_programs.expressions import Block, Expression, Gen, MessageBlocks, Part, Role, Select, parts_of


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
    state = _TracedState()
    try:
        function(state, **with_unknown(signature, known))
    except TraceEnded as end:
        return Trace(state.content, end.reason, end.location)
    except Exception as error:
        return Trace(state.content, f"it cannot be traced on: {type(error).__name__}: {error}", line_of(error))
    return Trace(state.content, "the program ends", None)


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


class _TracedState(MessageBlocks):
    """Takes the place of a state. Whatever is more than appending ends the trace."""

    def __init__(self) -> None:
        self.content = Content()

    def __iadd__(self, other: str | Expression) -> _TracedState:
        location = caller_location()
        for part in parts_of(other):
            self._append(part, location)
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise TraceEnded(f"the program uses {name} of its state", caller_location())

    def __getitem__(self, name: str) -> NoReturn:
        raise TraceEnded(f"the program reads {name!r}", caller_location())

    def __contains__(self, name: object) -> NoReturn:
        raise TraceEnded(f"the program looks for {name!r}", caller_location())

    def _block(self, role: Role) -> Iterator[None]:
        self.content = self.content.opened(role, caller_location())
        try:
            yield
        except Exception:  # of the program, which may catch it; the end of a trace leaves the block as it is
            self.content = self.content.closed()
            raise
        self.content = self.content.closed()

    def _append(self, part: Part, location: Location) -> None:
        if isinstance(part, Block):
            self.content = self.content.opened(part.role, part.location)
            for inner in part.parts:
                self._append(inner, location)
            self.content = self.content.closed()
        elif isinstance(part, Gen | Select):
            raise TraceEnded(f"the program makes its first call, {part.name!r}", part.location)
        elif isinstance(part, str):
            constant, mark, _ = part.partition(MARK)
            if constant:
                self.content = self.content.added(constant, location)
            if mark:
                raise TraceEnded("an argument follows", location)
        else:
            raise TraceEnded("an image or a video follows", location)
