"""The stacks of `kvrelay up` on this machine. Each writes `PORT/stack.json` in its state directory while it runs, by
which `kvrelay status`, `stop` and other commands find it; and requests to the router that a command names or finds."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.config.common import mask_password
from kvrelay.config.up_config import UpConfig
from kvrelay.flag_parser import CommandFailed, FlagParser, no_answer, number, whole
from kvrelay.process_identity import has_ended, running_process_id

STATE_DIR = Path(str(UpConfig.model_fields["state_dir"].default))
NO_STACK = "no stack of kvrelay up runs in"
DETACHED = "KVRELAY_INHERITED_DETACHED"
"""Set for a `kvrelay up` that has no terminal, so that it names another way to stop it than Ctrl-C."""
POLL_S = 0.1
_FILE = "stack.json"


STARTING, READY, DIED, STOPPING, STOPPED = "starting", "ready", "died", "stopping", "stopped"
"""States of a process; `kvrelay.cli.supervisor` says how they follow each other."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of a stack."""

    name: str
    role: str
    pid: int | None  # None before its first start
    state: str
    ends_within_s: float = 0.0  # after SIGTERM; then it is killed


@dataclass(frozen=True, slots=True)
class StackState:
    """What other commands need to know of a stack. `redis_url` contains a password."""

    pid: int
    identity: str  # the result of `process_identity`
    port: int
    url: str
    model: str
    redis_url: str
    redis_prefix: str
    is_ready: bool = False  # all were ready once
    processes: tuple[ProcessState, ...] = ()

    @property
    def state(self) -> str:
        if not self.is_ready:
            return STARTING
        return READY if all(process.state == READY for process in self.processes) else "not all ready"

    @property
    def is_running(self) -> bool:
        return running_process_id(self.identity) == self.pid and not has_ended(self.identity)

    def write(self, directory: Path) -> None:
        """Replaces the stack's file, which only this user can read. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)  # removed since the start
        path = directory / f"{_FILE}.new"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self))
        path.rename(directory / _FILE)


def remove_state(directory: Path) -> None:
    with suppress(OSError):
        (directory / _FILE).unlink()


def running_stacks(state_dir: Path) -> list[StackState]:
    """The stacks that run now, by port."""
    found = []
    for path in state_dir.glob(f"*/{_FILE}"):
        with suppress(OSError, msgspec.DecodeError):  # it ends meanwhile, or is of another version
            found.append(msgspec.json.decode(path.read_bytes(), type=StackState))
    return sorted((stack for stack in found if stack.is_running), key=lambda stack: stack.port)


def find_stack(state_dir: Path, port: int | None) -> StackState:
    """The stack at `port`, or the only one. Raises CommandFailed."""
    stacks = running_stacks(state_dir)
    chosen = [stack for stack in stacks if port in (None, stack.port)]
    if len(chosen) == 1:
        return chosen[0]
    ports = ", ".join(str(stack.port) for stack in stacks)
    if chosen:
        raise CommandFailed(f"several stacks run in {state_dir}, on ports {ports}: choose one with --port")
    if stacks:
        raise CommandFailed(f"no stack runs on port {port} in {state_dir}; there are: {ports}")
    raise CommandFailed(f"{NO_STACK} {state_dir}; name its directory with --state-dir")


def add_stack_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--port` and `--state-dir`, which name a stack of `kvrelay up`."""
    parser.add_argument("--port", type=whole(1, 65535), metavar="N", help="the stack of kvrelay up at this port")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help=f"the state directory of kvrelay up (default: {STATE_DIR})"
    )


def named_stack(arguments: argparse.Namespace) -> StackState | None:
    """The stack that the flags of `add_stack_flags` name, or else the only one of the default directory. None if no
    flag is given and there is not exactly one. Raises CommandFailed."""
    is_named = arguments.port is not None or arguments.state_dir is not None
    try:
        return find_stack(arguments.state_dir or STATE_DIR, arguments.port)
    except CommandFailed:
        if is_named:
            raise
        return None


class InstanceLock(ExitStack):
    """Keeps two instances of `kvrelay up` from one port and one log directory, until `close` or the end of the process.
    A `HeldPort` does not: until a server listens, any number of sockets may reserve the same port."""

    def __init__(self, port: int, log_directory: Path | None) -> None:
        """Raises CommandFailed if another instance has the port or the directory. None: no logs are written."""
        super().__init__()
        try:
            if sys.platform == "linux":
                self.enter_context(_hold_port_name(port))
            if log_directory is not None:
                self.callback(os.close, _lock_directory(log_directory))
        except CommandFailed:
            self.close()
            raise


def _hold_port_name(port: int) -> socket.socket:
    """An abstract Unix socket. As with ports, its name belongs to the network namespace and ends with the process."""
    name = f"\0kvrelay-up-{port}"
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(name)
        holder.listen()  # the refused instance connects to read this process's id
    except OSError:
        holder.close()
        reason = f"another kvrelay up{_process_of(name)} uses port {port}"
        raise CommandFailed(f"{reason}; stop it, or name another port with --port", 2) from None
    return holder


def _process_of(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:  # it has ended since
            return ""
        return f" (process {struct.unpack('3i', credentials)[0]})"


def _lock_directory(directory: Path) -> int:
    """Returns the descriptor that holds the lock."""
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        reason = f"cannot write logs to {directory}: {error.strerror}"
        raise CommandFailed(f"{reason}; name another --state-dir", 2) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        reason = f"another kvrelay up writes its logs to {directory}"
        raise CommandFailed(f"{reason}; stop it, or name another --state-dir or --port", 2) from None
    return descriptor


def status(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 if there is a stack and all are ready, else 1."""
    arguments = status_parser().parse(argv)
    state_dir = arguments.state_dir or STATE_DIR
    stacks = [stack for stack in running_stacks(state_dir) if arguments.port in (None, stack.port)]
    if not stacks:
        at = "" if arguments.port is None else f" on port {arguments.port}"
        print(f"no stack of kvrelay up runs{at} in {state_dir}")
        return 1
    print("\n\n".join(_description(stack, state_dir) for stack in stacks))
    return 0 if all(stack.state == READY for stack in stacks) else 1


def _description(stack: StackState, state_dir: Path) -> str:
    processes = (ProcessState("kvrelay up", "", stack.pid, ""), *stack.processes)
    width = max(len(process.name) for process in processes)
    lines = [
        f"{stack.url}  {stack.state}  {stack.model}",
        f"  logs   {state_dir / str(stack.port)}",
        f"  redis  {mask_password(stack.redis_url)}, prefix {stack.redis_prefix}",
        f"  {'PROCESS':{width}}  {'ROLE':7}  {'STATE':8}  {'PID':>8}",
    ]
    for process in processes:
        pid = "-" if process.pid is None else process.pid
        lines.append(f"  {process.name:{width}}  {process.role:7}  {process.state:8}  {pid:>8}")
    return "\n".join(lines)


def status_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay status",
        "Lists the stacks that kvrelay up runs, with their processes. The exit status is 0 if all are ready.",
        usage="kvrelay status [flags]",
    )
    add_stack_flags(parser)
    return parser


def stop(argv: Sequence[str]) -> int:
    """Raises CommandFailed if there is no such stack, or it does not end in time."""
    arguments = stop_parser().parse(argv)
    stack = find_stack(arguments.state_dir or STATE_DIR, arguments.port)
    try:
        os.kill(stack.pid, signal.SIGTERM)
    except OSError as error:
        raise CommandFailed(f"process {stack.pid}: {error.strerror}") from None
    deadline = time.monotonic() + arguments.timeout
    while stack.is_running:
        if time.monotonic() > deadline:
            raise CommandFailed(f"{stack.url} (process {stack.pid}) still drains; stop again to end it at once")
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


def up_detached(argv: Sequence[str], state_dir: Path) -> int:
    """Starts a stack in the background and waits until it is ready. Returns 0, or the status of a stack that ended."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        log = state_dir / f"up-{os.getpid()}.log"
        output = log.open("wb")
    except OSError as error:
        raise CommandFailed(f"cannot write to {state_dir}: {error.strerror}; name another --state-dir", 2) from None
    command = [sys.executable, "-m", "kvrelay", "up", *argv, "--no-detach"]
    with output:
        process = subprocess.Popen(
            command,
            env={**os.environ, DETACHED: "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        stack = _wait_ready(process, state_dir)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        stack = None
    if stack is None:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
        log.unlink()
        return process.returncode or 1
    kept = log.rename(state_dir / str(stack.port) / "up.log")
    sys.stdout.write(kept.read_text(encoding="utf-8", errors="replace"))
    print(f"Runs in the background (process {stack.pid}, log {kept}).")
    return 0


def _wait_ready(process: subprocess.Popen[bytes], state_dir: Path) -> StackState | None:
    """None if the process ends before its stack is ready."""
    while process.poll() is None:
        for stack in running_stacks(state_dir):
            if stack.pid == process.pid and stack.is_ready:
                return stack
        time.sleep(2 * POLL_S)
    return None


DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVRELAY_API_KEY"


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the URL and the flags that name a stack."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        type=_url,
        help=f"the router (default: the stack that runs here, or {DEFAULT_URL})",
    )
    add_stack_flags(parser)


def router_url(arguments: argparse.Namespace) -> str:
    """The URL without a slash at its end. Raises CommandFailed."""
    if arguments.url is not None:
        return str(arguments.url)
    stack = named_stack(arguments)
    return DEFAULT_URL if stack is None else stack.url


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} must start with http:// or https://")
    return text.rstrip("/")


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
    """Sends GET, or POST with a body, with the key of `KEY_VARIABLE`. Returns the open answer, to be read and closed.
    Raises CommandFailed if the router refuses or does not answer."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        hint = f"; set {KEY_VARIABLE}" if error.code == 401 else ""
        raise CommandFailed(f"{url}{path} answers {error.code}: {_message(error.read())}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise CommandFailed(no_answer(url, error)) from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
