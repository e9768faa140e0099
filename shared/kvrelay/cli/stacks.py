"""`kvrelay status` and `kvrelay stop`: the stacks of `kvrelay up` that run from a state directory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from kvrelay.cli.stack_state import STATE_DIR, NoStack, add_stack_flags, find_stack, is_running, running_stacks
from kvrelay.flag_parser import FlagParser
from kvrelay.flag_values import number

POLL_S = 0.1


def status(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 if there is a stack and all are ready, else 1."""
    arguments = status_parser().parse(argv)
    state_dir = arguments.state_dir or STATE_DIR
    stacks = [stack for stack in running_stacks(state_dir) if arguments.port in (None, stack.port)]
    if not stacks:
        at = "" if arguments.port is None else f" on port {arguments.port}"
        print(f"no stack of kvrelay up runs{at} in {state_dir}")
        return 1
    for stack in stacks:
        state = "ready" if stack.is_ready else "starting"
        print(f"{stack.url}  {state}  {stack.model}  process {stack.pid}  logs {state_dir / str(stack.port)}")
    return 0 if all(stack.is_ready for stack in stacks) else 1


def status_parser() -> FlagParser:
    parser = FlagParser("kvrelay status", "Lists the stacks that kvrelay up runs.", usage="kvrelay status [flags]")
    add_stack_flags(parser)
    return parser


def stop(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if there is no such stack, or it does not end in time."""
    arguments = stop_parser().parse(argv)
    try:
        stack = find_stack(arguments.state_dir or STATE_DIR, arguments.port)
        os.kill(stack.pid, signal.SIGTERM)
    except NoStack as error:
        print(f"kvrelay stop: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kvrelay stop: process {stack.pid}: {error.strerror}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + arguments.timeout
    while is_running(stack):
        if time.monotonic() > deadline:
            print(
                f"kvrelay stop: {stack.url} (process {stack.pid}) still drains; stop again to end it at once",
                file=sys.stderr,
            )
            return 1
        time.sleep(POLL_S)
    print(f"stopped {stack.url}")
    return 0


def stop_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay stop",
        "Stops a stack of kvrelay up: open requests may finish, then all its processes end.",
        usage="kvrelay stop [flags]",
    )
    add_stack_flags(parser)
    parser.add_argument(
        "--timeout",
        type=number(0, 86400),
        default=60.0,
        metavar="SECONDS",
        help="wait so long for its end (default: 60)",
    )
    return parser
