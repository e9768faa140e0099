"""Errors of a program. Each names the line of the program that asked for what failed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Location:
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def is_of_package(file: str) -> bool:
    """Returns whether a source file belongs to this package."""
    return file.startswith(_PACKAGE)


def caller_location() -> Location:
    """The innermost line on the stack that is outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_of_package(frame.f_code.co_filename):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


def wrong_value(message: str) -> ValueError:
    """An argument is wrong; the message begins with the line of the program."""
    return ValueError(f"{caller_location()}: {message}")


class ProgramError(Exception):
    """A program is wrong, or one of its calls failed. `location` is the line of the program."""

    def __init__(self, message: str, location: Location | None = None) -> None:
        super().__init__(message if location is None else f"{location}: {message}")
        self.location = location


class ProgramCancelled(ProgramError):
    """The program was cancelled before this value was complete."""


class DeadlineExceeded(ProgramError):
    """The program's deadline passed before this value was complete."""


class EndpointError(Exception):
    """The endpoint refused a call, broke off its answer or could not be reached. `status` is None without an answer."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class CannotScore(EndpointError):
    """The endpoint does not give log-probabilities of prompts."""
