"""The argument parser of all commands: one line for an error, the closest known name, short and complete help. Types of
flags raise argparse.ArgumentTypeError with the text and what is allowed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar


def closest(name: str, known: Collection[str]) -> str:
    """Returns `; did you mean X?`, or "" if no known name is similar."""
    found = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


class CommandFailed(Exception):
    """Ends a command, which prints the message and exits with the status: 2 for flags and configuration, else 1."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class FlagParser(argparse.ArgumentParser):
    """Flags may be in groups that only `--help-all` shows. An error is one line, with the closest known flag.

    `advice` has what to use in place of flags that the command does not have, by flag.
    """

    def __init__(
        self,
        prog: str | None,
        description: str | None,
        usage: str | None = None,
        *,
        advice: Mapping[str, str] | None = None,
        with_version: bool = False,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            allow_abbrev=False,
            add_help=False,
            exit_on_error=False,
            formatter_class=_HelpFormatter,
        )
        self._advice = advice or {}
        self._further: list[argparse._ArgumentGroup] = []
        self._about = self.add_argument_group("help")
        self._about.add_argument("-h", "--help", action="help", help="show the help and exit")
        if with_version:
            self._about.add_argument(
                "--version",
                action="version",
                version=f"kvrelay {metadata.version('kvrelay')}",
                help="show the version and exit",
            )

    def add_further_group(self, title: str) -> argparse._ArgumentGroup:
        """A group that only `--help-all` shows."""
        if not self._further:
            self._about.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
        group = self.add_argument_group(title)
        self._further.append(group)
        return group

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The given values. Exits with status 2 for an unknown flag or a wrong value."""
        given = sys.argv[1:] if argv is None else list(argv)
        for each in given:  # before argparse, which would report a missing argument first
            if each == "--":
                break
            if each.startswith("--") and each.partition("=")[0] not in self._option_string_actions:
                self._refuse(each)
        try:
            values, unknown = self.parse_known_args(given)
        except argparse.ArgumentError as error:
            self.error(_explained(error, given))
        if unknown:
            self._refuse(next((each for each in unknown if each.startswith("-")), unknown[0]))
        return values

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        name = argument.partition("=")[0]
        if name in self._advice:
            self.error(f"there is no {name}: {self._advice[name]}")
        self.error(f"unknown flag {name}{closest(name, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and one line."""
        message = message.replace("the following arguments are required: ", "needs ")
        end = "--help-all lists all flags" if self._further else "--help lists the flags"
        self.exit(2, f"{self.prog}: {message} ({self.prog} {end})\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} must be one of {', '.join(map(str, action.choices))}")

    def format_help(self) -> str:
        """The help without the further groups."""
        groups = self._action_groups
        self._action_groups = [group for group in groups if group not in self._further]
        try:
            text = super().format_help()
        finally:
            self._action_groups = groups
        more = sum(len(group._group_actions) for group in self._further)
        return f"{text}\n{more} more flags: {self.prog} --help-all\n" if more else text

    def format_help_all(self) -> str:
        return super().format_help()


def _explained(error: argparse.ArgumentError, given: Sequence[str]) -> str:
    """The error in terms of the flag as it was given."""
    message = error.message
    if error.argument_name is None:
        return message
    names = error.argument_name.split("/")
    flags = [each.partition("=")[0] for each in given]
    name = next((each for each in names if each in flags), names[0])
    if message == "expected one argument":
        return f"{name} needs a value"
    if found := re.fullmatch(r"expected (\d+) arguments", message):
        return f"{name} needs {found[1]} values"
    if (value := message.removeprefix("ignored explicit argument ")) != message:
        return f"{name} takes no value, and {value} was given"
    return f"{name}: {message}"


class _HelpFormatter(argparse.HelpFormatter):
    """Shows a flag's own name, and not those of other servers (`docs/configuration.md` has them). Names the value once,
    as argparse does from Python 3.13 on."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not name.startswith("--")]
        num_own = 2 if isinstance(action, argparse.BooleanOptionalAction) else 1
        names += [name for name in action.option_strings if name.startswith("--")][:num_own]
        if not names:
            return super()._format_action_invocation(action)
        if action.nargs != 0:
            names[-1] += f" {self._format_args(action, self._get_default_metavar_for_optional(action))}"
        return ", ".join(names)


class _HelpAll(argparse.Action):
    """Prints the help with all groups."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlagParser)
        sys.stdout.write(parser.format_help_all())
        parser.exit()


UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|min|h)")

ValueT = TypeVar("ValueT")


def result_file(text: str) -> Path:
    """A file that a command writes at its end: found to be impossible before it begins."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file, and is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be in a directory that exists: there is no {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that can be written: permission denied")
    return path


def number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least:g} to {most:g}")
        return value

    return read


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
        return int(text)

    return read


def list_of(read_one: Callable[[str], ValueT]) -> Callable[[str], list[ValueT]]:
    return lambda text: [read_one(each.strip()) for each in text.split(",")]


def seconds(text: str) -> float:
    """A time with its unit, in seconds: `500ms`, `2s`, `1.5min`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a time with its unit ({', '.join(UNITS_S)}), above 0, as in 500ms or 2s"
        )
    return float(match[1]) * UNITS_S[match[2]]


def objective(*names: str) -> Callable[[str], tuple[str, float]]:
    """`NAME=TIME` for one of these names, as the name and seconds."""

    def read(text: str) -> tuple[str, float]:
        name, _, time = text.strip().partition("=")
        forms = ", ".join(f"{each}=TIME" for each in names)
        if name not in names:
            raise argparse.ArgumentTypeError(f"{text!r} must be one of {forms}, as in {names[0]}=500ms")
        return name, seconds(time)

    return read


def own_command(*, from_anywhere: bool = False) -> str:
    """Returns `kvrelay` if the PATH leads to this installation, else the path of the script for a shell, such as
    `.venv/bin/kvrelay`: relative to the current directory if the script lies below it, unless `from_anywhere`."""
    python = Path(sys.executable)
    found = shutil.which("kvrelay")
    if found is not None and Path(found).resolve().parent == python.parent.resolve():
        return "kvrelay"
    script = python.with_name("kvrelay")
    program, arguments = (script, []) if script.exists() else (python, ["-m", "kvrelay"])
    if not from_anywhere:
        with suppress(FileNotFoundError):  # the current directory was deleted
            if program.is_relative_to(here := Path.cwd()):
                program = program.relative_to(here)
    return shlex.join([str(program), *arguments])


def cause(error: Exception) -> str:
    """The system's words for an error of a connection, such as `Connection refused`."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)


def no_answer(url: str, error: Exception) -> str:
    """Why a router does not answer, and what to do."""
    return f"{url} does not answer ({cause(error)}); start one with `{own_command()} up`, or name its URL"
