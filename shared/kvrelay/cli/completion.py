"""`kvrelay completion SHELL`: prints a script that completes commands, flags and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shtab

from kvrelay.cli.main import COMMANDS
from kvrelay.flag_parser import FlagParser

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": "kvrelay completion bash > ~/.local/share/bash-completion/completions/kvrelay",
    "zsh": "kvrelay completion zsh > ~/.zfunc/_kvrelay   (with ~/.zfunc in fpath)",
    "fish": "kvrelay completion fish > ~/.config/fish/completions/kvrelay.fish",
}
_FILES = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}


def completion(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    arguments = completion_parser().parse(argv)
    sys.stdout.write(script(arguments.shell))
    return 0


def completion_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay completion",
        "Prints a script that completes commands, flags and values. It is read from a file, once for each shell: "
        + "; ".join(INSTALL.values()),
        usage="kvrelay completion bash|zsh|fish",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    return parser


def script(shell: str) -> str:
    """The script for one of `SHELLS`."""
    text: str = shtab.complete(_all_commands(), shell)
    return text if text.endswith("\n") else f"{text}\n"


def _all_commands() -> argparse.ArgumentParser:
    """One parser of all commands."""
    whole = argparse.ArgumentParser(prog="kvrelay", add_help=False)
    whole.add_argument("-h", "--help", action="help", help="list the commands")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(dest="command")
    for command in COMMANDS.values():
        own = command.flag_parser()
        for action in own._actions:
            _name_values(action)
        commands.add_parser(command.name, parents=[own], add_help=False, help=command.text, description=command.text)
    commands.add_parser("version", help="print the version")
    return whole


def _name_values(action: argparse.Action) -> None:
    """Says what a value is by its name in the help: a file, a directory, or one of several words."""
    metavar = action.metavar
    if not isinstance(metavar, str):
        return
    if metavar in _FILES:
        action.complete = _FILES[metavar]  # type: ignore[attr-defined]
    elif "|" in metavar and not action.choices:
        action.choices = metavar.split("|")
