"""An argument or a value of a program that is not known while the program is traced."""

from __future__ import annotations

from typing import Any, NoReturn

from kvrelay_programs.errors import Location, caller_location

MARK = "\U0010fffe"  # not a character, so no text has it
"""Begins an argument in a text."""


class TraceEnded(BaseException):
    """Not an Exception, so that a program which handles errors does not go on with what is not known."""

    def __init__(self, reason: str, location: Location) -> None:
        super().__init__(f"{location}: {reason}")
        self.reason, self.location = reason, location


class Argument:
    """Its attributes, items and calls are not known either, and in a text it is a mark. Whatever else depends on its
    value raises TraceEnded.
    """

    def __init__(self, name: str, kind: str = "argument") -> None:
        self._name, self._kind = name, kind

    def __str__(self) -> str:
        return MARK

    def __format__(self, spec: str) -> str:
        return MARK

    def __add__(self, other: Any) -> Any:
        return MARK + other

    def __radd__(self, other: Any) -> Any:
        return other + MARK

    def __getattr__(self, name: str) -> Argument:
        if name.startswith("__"):
            raise AttributeError(name)
        return Argument(f"{self._name}.{name}", self._kind)

    def __getitem__(self, key: object) -> Argument:
        return Argument(f"{self._name}[{key!r}]", self._kind)

    def __call__(self, *args: object, **kwargs: object) -> Argument:
        return Argument(f"{self._name}()", self._kind)

    def _needed(self, *args: object) -> NoReturn:
        raise TraceEnded(f"it cannot be traced on: it branches on the {self._kind} {self._name!r}", caller_location())

    __bool__ = __len__ = __iter__ = __contains__ = __int__ = __float__ = __index__ = __hash__ = _needed
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed
