"""Finds running stacks of `kvrelay up` by their state directory: each writes `PORT/stack.json` there while it runs."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.config.up_config import UpConfig
from kvrelay.flag_values import whole

STATE_DIR = Path(str(UpConfig.model_fields["state_dir"].default))
NO_STACK = "no stack of kvrelay up runs in"
_FILE = "stack.json"


class NoStack(Exception):
    """There is no such stack, or there are several. The message is for the user."""


@dataclass(frozen=True, slots=True)
class StackState:
    """What other commands need to know of a stack. `redis_url` contains a password."""

    pid: int
    port: int
    url: str
    model: str
    redis_url: str
    redis_prefix: str
    started: int  # with the process id, it names one process: see `start_of`
    is_ready: bool = False

    def write(self, directory: Path) -> None:
        """Replaces the stack's file, which only this user can read. Raises OSError."""
        path = directory / f"{_FILE}.new"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        path.rename(directory / _FILE)


def remove_state(directory: Path) -> None:
    with suppress(OSError):
        (directory / _FILE).unlink()


def running_stacks(state_dir: Path) -> list[StackState]:
    """The stacks that run now, by port."""
    found = []
    for path in state_dir.glob(f"*/{_FILE}"):
        with suppress(OSError, ValueError, TypeError):  # it ends meanwhile, or is of another version
            found.append(StackState(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(filter(is_running, found), key=lambda stack: stack.port)


def is_running(stack: StackState) -> bool:
    return start_of(stack.pid) == stack.started


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot. None if there is no such process or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def find_stack(state_dir: Path, port: int | None) -> StackState:
    """The stack at `port`, or the only one. Raises NoStack."""
    stacks = running_stacks(state_dir)
    chosen = [stack for stack in stacks if port in (None, stack.port)]
    if len(chosen) == 1:
        return chosen[0]
    ports = ", ".join(str(stack.port) for stack in stacks)
    if chosen:
        raise NoStack(f"several stacks run in {state_dir}, on ports {ports}: choose one with --port")
    if stacks:
        raise NoStack(f"no stack runs on port {port} in {state_dir}; there are: {ports}")
    raise NoStack(f"{NO_STACK} {state_dir}; name its directory with --state-dir")


def add_stack_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--port` and `--state-dir`, which name a stack of `kvrelay up`."""
    parser.add_argument("--port", type=whole(1, 65535), metavar="N", help="the stack of kvrelay up at this port")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help=f"the state directory of kvrelay up (default: {STATE_DIR})"
    )


def named_stack(arguments: argparse.Namespace) -> StackState | None:
    """The stack that the flags of `add_stack_flags` name, or else the only one of the default directory. None if no
    flag is given and there is not exactly one. Raises NoStack."""
    is_named = arguments.port is not None or arguments.state_dir is not None
    try:
        return find_stack(arguments.state_dir or STATE_DIR, arguments.port)
    except NoStack:
        if is_named:
            raise
        return None
