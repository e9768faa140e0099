"""The commands of `kvrelay`: what runs each, and where its flags are described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.flag_parser import FlagParser


@dataclass(frozen=True, slots=True)
class Command:
    """`package` is run in place of this process; without one, the command is the function of its name beside the
    parser. `parser` is MODULE:FUNCTION. Both are named, so that this module imports nothing."""

    name: str
    group: str
    text: str
    parser: str
    package: str | None = None

    def flag_parser(self) -> FlagParser:
        """The parser of the command's flags. Imports what the command does."""
        module, _, function = self.parser.partition(":")
        make: Callable[[], FlagParser] = getattr(import_module(module), function)
        return make()

    def run(self, argv: Sequence[str]) -> int:
        """Runs a command without a package. Returns the exit status."""
        function: Callable[[Sequence[str]], int] = getattr(import_module(self.parser.partition(":")[0]), self.name)
        return function(argv)


_HERE, _SERVICES, _FLEET, _MEASURE = "on one machine", "services", "a running fleet", "measuring and planning"
_PARSERS = "kvrelay.cli.services"

COMMANDS = {
    command.name: command
    for command in (
        Command("up", _HERE, "start everything on this machine", "kvrelay.cli.up:up_parser"),
        Command("status", _HERE, "list the stacks that `kvrelay up` runs here", "kvrelay.cli.stacks:status_parser"),
        Command("stop", _HERE, "stop a stack of `kvrelay up`", "kvrelay.cli.stacks:stop_parser"),
        Command("chat", _HERE, "talk to a served model in this terminal", "kvrelay.cli.chat:chat_parser"),
        Command(
            "router",
            _SERVICES,
            "the HTTP endpoint: takes requests and decides which workers serve them",
            f"{_PARSERS}:router_parser",
            "kvrelay_router",
        ),
        Command(
            "prefill",
            _SERVICES,
            "a prefill worker: computes prompts and hands them over",
            f"{_PARSERS}:prefill_parser",
            "kvrelay_prefill",
        ),
        Command(
            "decode",
            _SERVICES,
            "a decode worker: takes prompts over and continues them",
            f"{_PARSERS}:decode_parser",
            "kvrelay_decode",
        ),
        Command(
            "rank", _SERVICES, "one rank of a worker whose model is divided among machines", f"{_PARSERS}:rank_parser"
        ),
        Command("top", _FLEET, "show the fleet in this terminal", "kvrelay.cli.top:top_parser"),
        Command("drain", _FLEET, "have routers send a worker nothing new", "kvrelay.cli.drain:drain_parser"),
        Command("health", _FLEET, "ask a service whether it is ready", "kvrelay.cli.health:health_parser"),
        Command("keys", _FLEET, "make a key that encrypts the traffic within a fleet", "kvrelay.cli.keys:keys_parser"),
        Command("replay", _FLEET, "check and read event logs", "kvrelay.cli.replay:replay_parser"),
        Command(
            "bench",
            _MEASURE,
            "measure any OpenAI-compatible endpoint under load",
            "kvrelay_bench.flags:bench_parser",
            "kvrelay_bench",
        ),
        Command(
            "simulate",
            _MEASURE,
            "replay a trace through a fleet of simulated devices",
            "kvrelay_simulator.simulate_command:simulate_parser",
            "kvrelay_simulator",
        ),
        Command(
            "measure",
            _MEASURE,
            "measure a profile of this machine for simulate",
            "kvrelay_simulator.measure_command:measure_parser",
            "kvrelay_simulator.measure_command",
        ),
        Command(
            "completion",
            "this command",
            "print a script that completes commands and flags in a shell",
            "kvrelay.cli.completion:completion_parser",
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
