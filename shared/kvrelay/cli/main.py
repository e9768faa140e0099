"""`kvrelay COMMAND`: the whole system at once, or one service."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

SERVICES = {
    "router": "the HTTP endpoint: takes requests and decides which workers serve them",
    "prefill": "a prefill worker: computes prompts and hands them over",
    "decode": "a decode worker: takes prompts over and continues them",
}

EPILOG = "Each command has its own --help. Flags, KVRELAY_* and a TOML file (--config) all take the same names."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="kvrelay", description="LLM serving with prefill and decode taken apart.", epilog=EPILOG
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("up", add_help=False, help="start everything on this machine")
    for service, text in SERVICES.items():
        commands.add_parser(service, add_help=False, help=text)
    commands.add_parser("replay", add_help=False, help="check and read event logs")
    commands.add_parser("drain", add_help=False, help="have routers send a worker nothing new")
    commands.add_parser("top", add_help=False, help="show the fleet in this terminal")
    commands.add_parser("health", add_help=False, help="ask a service whether it is ready")
    commands.add_parser("keys", add_help=False, help="make a key that encrypts what a fleet's processes say")
    commands.add_parser("bench", add_help=False, help="measure any OpenAI-compatible endpoint under load")
    commands.add_parser("simulate", add_help=False, help="replay a trace through a fleet of simulated devices")
    commands.add_parser("measure", add_help=False, help="measure a profile of this machine for simulate")
    commands.add_parser("version", help="print the version")
    command = parser.parse_args(arguments[:1]).command
    rest = arguments[1:]
    if command in SERVICES:
        # Services are run by name: this package knows of no service's code.
        os.execv(sys.executable, [sys.executable, "-m", f"kvrelay_{command}", *rest])
    if command == "bench":
        os.execv(sys.executable, [sys.executable, "-m", "kvrelay_bench", *rest])
    if command == "simulate":
        os.execv(sys.executable, [sys.executable, "-m", "kvrelay_simulator", *rest])
    if command == "measure":
        os.execv(sys.executable, [sys.executable, "-m", "kvrelay_simulator.measure", *rest])
    if command == "up":
        from kvrelay.cli.up import up

        return up(rest)
    if command == "replay":
        from kvrelay.cli.replay import replay

        return replay(rest)
    if command == "top":
        from kvrelay.cli.top import top

        return top(rest)
    if command == "drain":
        from kvrelay.cli.drain import drain

        return drain(rest)
    if command == "keys":
        from kvrelay.cli.keys import keys

        return keys(rest)
    if command == "health":
        from kvrelay.cli.health import health

        return health(rest)
    print(f"kvrelay {metadata.version('kvrelay')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
