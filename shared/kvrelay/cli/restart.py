"""`kvrelay restart PROCESS`: SIGTERM, upon which it drains; the supervisor of its stack starts it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvrelay.cli.stacks import (
    DIED,
    POLL_S,
    READY,
    STATE_DIR,
    STOPPED,
    ProcessState,
    StackState,
    add_stack_flags,
    find_stack,
)
from kvrelay.flag_parser import CommandFailed, FlagParser

COSTS = {
    "router": "clients cannot connect",
    "prefill": "decode workers compute the prompts",
    "decode": "requests wait, and get 503 after max_wait_for_worker_s",
}
"""While no process of the role is ready."""


def restart(argv: Sequence[str]) -> int:
    """Returns when the process is ready again. Raises CommandFailed."""
    arguments = restart_parser().parse(argv)
    state_dir = arguments.state_dir or STATE_DIR
    stack = find_stack(state_dir, arguments.port)
    old = _process(stack, arguments.process)
    log = state_dir / str(stack.port) / f"{old.name}.log"
    if old.pid is None or old.state != READY:
        raise CommandFailed(f"{old.name} is not ready ({old.state}): kvrelay up starts it by itself; its log is {log}")
    if [(process.role, process.state) for process in stack.processes].count((old.role, READY)) == 1:
        print(f"no other {old.role} is ready: until {old.name} is ready again, {COSTS[old.role]}", flush=True)
    _signal(old, signal.SIGTERM)
    print(
        f"{old.name} (process {old.pid}) drains, for at most {old.ends_within_s:g} s, and is started again", flush=True
    )
    new, seconds = _successor(stack, old, state_dir, log)
    print(f"{old.name} is ready again after {seconds:.1f} s (process {new.pid})")
    return 0


def restart_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay restart",
        "Restarts a worker or the router of a kvrelay up with the same settings: it takes nothing new, finishes or "
        "passes on what it has, ends and starts again. Returns when it is ready. No request fails if another worker "
        "of its role is.",
        usage="kvrelay restart PROCESS [flags]",
    )
    parser.add_argument("process", metavar="PROCESS", help="as kvrelay status names it")
    add_stack_flags(parser)
    return parser


def _process(stack: StackState, name: str) -> ProcessState:
    restartable = {process.name: process for process in stack.processes if process.role}
    if name not in restartable:
        raise CommandFailed(
            f"no worker or router {name} in the stack at {stack.url}; there are: {', '.join(restartable)}"
        )
    return restartable[name]


def _successor(stack: StackState, old: ProcessState, state_dir: Path, log: Path) -> tuple[ProcessState, float]:
    """Waits for the end of `old` and for its successor. Returns the successor, and the seconds until it was ready."""
    started = time.monotonic()
    while True:
        new = _process(find_stack(state_dir, stack.port), old.name)
        seconds = time.monotonic() - started
        if new.pid == old.pid:
            if seconds > old.ends_within_s:  # it hangs
                _signal(old, signal.SIGKILL)
        elif new.state == READY:
            return new, seconds
        elif new.state in (DIED, STOPPED):
            raise CommandFailed(f"{old.name} ended again before it was ready; kvrelay up tries on, its log is {log}")
        time.sleep(POLL_S)


def _signal(process: ProcessState, number: signal.Signals) -> None:
    """Signals the process with its ranks."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
