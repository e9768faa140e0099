"""`kvrelay COMMAND`: runs a service or a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

COMMANDS = {
    "up": (None, "start everything on this machine"),
    "status": (None, "list the stacks that `kvrelay up` runs here"),
    "stop": (None, "stop a stack of `kvrelay up`"),
    "chat": (None, "talk to a served model in this terminal"),
    "router": ("kvrelay_router", "the HTTP endpoint: takes requests and decides which workers serve them"),
    "prefill": ("kvrelay_prefill", "a prefill worker: computes prompts and hands them over"),
    "decode": ("kvrelay_decode", "a decode worker: takes prompts over and continues them"),
    "rank": (None, "one rank of a worker whose model is divided among machines"),
    "replay": (None, "check and read event logs"),
    "drain": (None, "have routers send a worker nothing new"),
    "top": (None, "show the fleet in this terminal"),
    "health": (None, "ask a service whether it is ready"),
    "keys": (None, "make a key that encrypts what a fleet's processes say"),
    "bench": ("kvrelay_bench", "measure any OpenAI-compatible endpoint under load"),
    "simulate": ("kvrelay_simulator", "replay a trace through a fleet of simulated devices"),
    "measure": ("kvrelay_simulator.measure_command", "measure a profile of this machine for simulate"),
}
"""Commands and the package that each runs by name, so that this module imports none of them. Without a package, the
command is a function in the module of its name here, imported on use."""

EPILOG = "Each command has its own --help. Flags, KVRELAY_* and a TOML file (--config) all take the same names."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="kvrelay",
        description="A disaggregated LLM server: prefill and decode run as separate services.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {metadata.version('kvrelay')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, add_help=False, help=text)
    commands.add_parser("version", help="print the version")
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        from kvrelay.config.variables import closest  # slow to import, and `health` runs often

        hint = closest(arguments[0], commands.choices)
        parser.exit(2, f"kvrelay: unknown command {arguments[0]!r}{hint} (kvrelay --help lists the commands)\n")
    command = parser.parse_args(arguments[:1]).command
    rest = arguments[1:]
    if command in COMMANDS:
        package, _ = COMMANDS[command]
        if package is not None:
            os.execv(sys.executable, [sys.executable, "-m", package, *rest])
        status: int = getattr(import_module(f"kvrelay.cli.{command}"), command)(rest)
        return status
    print(f"kvrelay {metadata.version('kvrelay')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
