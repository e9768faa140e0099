"""The argument parser of commands with many flags: one line for an error, short and complete help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from kvrelay.config.variables import closest


class FlagParser(argparse.ArgumentParser):
    """Flags may be in groups that only `--help-all` shows. An error is one line, with the closest known flag."""

    def __init__(self, prog: str | None, description: str | None, usage: str | None = None) -> None:
        super().__init__(prog=prog, description=description, usage=usage, allow_abbrev=False, add_help=False)
        self._further: list[argparse._ArgumentGroup] = []
        about = self.add_argument_group("help")
        about.add_argument("-h", "--help", action="help", help="show the help and exit")
        about.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
        about.add_argument("--version", action="version", version=f"kvrelay {metadata.version('kvrelay')}")

    def add_further_group(self, title: str) -> argparse._ArgumentGroup:
        """A group that only `--help-all` shows."""
        group = self.add_argument_group(title)
        self._further.append(group)
        return group

    def parse(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """The given values by field. Exits with status 2 for an unknown flag."""
        values, unknown = self.parse_known_args(argv)
        if unknown:
            flag = next((each for each in unknown if each.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {unknown[0]!r}")
            name = flag.partition("=")[0]
            self.error(f"unknown flag {name}{closest(name, self._option_string_actions)}")
        return vars(values)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help-all lists all flags)\n")

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
