"""`kvrelay COMMAND`: the commands, and how one is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from kvrelay.flag_parser import CommandFailed, closest

if TYPE_CHECKING:
    from kvrelay.flag_parser import FlagParser


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has the command as a function of its name, and `NAME_parser`. It is named, so that this module imports
    nothing. A `package` is run in place of this process instead of the function."""

    name: str
    group: str
    text: str
    module: str
    package: str | None = None

    def flag_parser(self) -> FlagParser:
        """The parser of the command's flags. Imports what the command does."""
        make: Callable[[], FlagParser] = getattr(import_module(self.module), f"{self.name}_parser")
        return make()

    def run(self, argv: Sequence[str]) -> int:
        """Runs a command without a package. Returns the exit status. Raises CommandFailed."""
        function: Callable[[Sequence[str]], int] = getattr(import_module(self.module), self.name)
        return function(argv)


_HERE, _SERVICES, _FLEET, _MEASURE = "on one machine", "services", "a running fleet", "measuring and planning"
_ROUTER = "the HTTP endpoint: takes requests and decides which workers serve them"
_PREFILL = "a prefill worker: computes prompts and hands them over"
_DECODE = "a decode worker: takes prompts over and continues them"
_OWN, _STACKS = "kvrelay.cli.services", "kvrelay.cli.stacks"

COMMANDS = {
    command.name: command
    for command in (
        Command("up", _HERE, "start everything on this machine", "kvrelay.cli.up"),
        Command("status", _HERE, "list the stacks that `kvrelay up` runs here", _STACKS),
        Command("restart", _HERE, "restart a process of a stack of `kvrelay up`", "kvrelay.cli.restart"),
        Command("stop", _HERE, "stop a stack of `kvrelay up`", _STACKS),
        Command("chat", _HERE, "talk to a served model in this terminal", "kvrelay.cli.chat"),
        Command("router", _SERVICES, _ROUTER, _OWN, "kvrelay_router"),
        Command("prefill", _SERVICES, _PREFILL, _OWN, "kvrelay_prefill"),
        Command("decode", _SERVICES, _DECODE, _OWN, "kvrelay_decode"),
        Command("rank", _SERVICES, "one rank of a worker whose model is divided among machines", _OWN),
        Command("top", _FLEET, "show the fleet in this terminal", "kvrelay.cli.top"),
        Command("drain", _FLEET, "have routers send a worker nothing new", "kvrelay.cli.drain"),
        Command("health", _FLEET, "ask a service whether it is ready", "kvrelay.cli.health"),
        Command("keys", _FLEET, "make a key that encrypts the traffic within a fleet", _OWN),
        Command("replay", _FLEET, "check and read event logs", "kvrelay.cli.replay"),
        Command("bench", _MEASURE, "measure any OpenAI-compatible endpoint under load", "kvrelay_bench.bench_command"),
        Command("size", _MEASURE, "print the memory and bandwidth that a model needs", "kvrelay.cli.size"),
        Command(
            "simulate",
            _MEASURE,
            "replay a trace through a fleet of simulated devices",
            "kvrelay_simulator.simulate_command",
        ),
        Command(
            "measure",
            _MEASURE,
            "measure a profile of this machine for simulate",
            "kvrelay_simulator.measure_command",
        ),
        Command(
            "completion",
            "this command",
            "print a script that completes commands and flags in a shell",
            "kvrelay.cli.completion",
        ),
    )
}
"""All commands but `version` and `help`, by name."""


def help_text() -> str:
    """The text of `kvrelay --help`."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: kvrelay COMMAND [flags]",
        "",
        "A disaggregated LLM server: prefill and decode run as separate services.",
    ]
    group = ""
    for command in COMMANDS.values():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines.append(f"  {command.name:<{width}}  {command.text}")
    lines += [
        f"  {'version':<{width}}  print the version",
        "",
        "kvrelay COMMAND --help describes its flags. Flags of services are also KVRELAY_* variables and fields of a",
        "TOML file (--config). Begin with: kvrelay up",
        "",
    ]
    return "\n".join(lines)


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
