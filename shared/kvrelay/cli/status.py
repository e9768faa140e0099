"""`kvrelay status`: lists the stacks of `kvrelay up` that run from a state directory."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cli.stack_state import STATE_DIR, add_stack_flags, running_stacks
from kvrelay.flag_parser import FlagParser


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
