"""`kvrelay COMMAND`: runs a service or a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from kvrelay.cli.commands import COMMANDS, help_text
from kvrelay.flag_parser import CommandFailed, closest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(help_text())
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0
    if name in ("--version", "version"):
        print(f"kvrelay {metadata.version('kvrelay')}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        kind = "flag" if name.startswith("-") else "command"
        hint = closest(name, ["--help", "--version"] if kind == "flag" else [*COMMANDS, "version"])
        sys.stderr.write(f"kvrelay: unknown {kind} {name!r}{hint} (kvrelay --help lists the commands)\n")
        return 2
    if command.package is not None:
        os.execv(sys.executable, [sys.executable, "-m", command.package, *rest])
    try:
        return command.run(rest)
    except CommandFailed as error:
        sys.stderr.write(f"kvrelay {name}: {error}\n")
        return error.status


if __name__ == "__main__":
    sys.exit(main())
