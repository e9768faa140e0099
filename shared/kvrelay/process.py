"""Process life cycle: exit status, event loop, exit when the parent exits, garbage collection, open files, ports."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from kvrelay.config import ConfigError
from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import variable_warnings
from kvrelay.logs import setup_logging
from kvrelay.machine_memory import num_memory_kills

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

SECRETS_OF_CONTAINERS = Path("/run/secrets"), Path("/var/run/secrets")
"""Where Docker and Kubernetes mount secrets. All users of a container may read there, and there is one."""

ConfigT = TypeVar("ConfigT", bound=CommonConfig)


class StartFailed(Exception):
    """The service cannot start: a port is in use, a model or tokenizer is missing or unsupported, a size does not fit.
    The message is for the user."""


class ServiceEnds(Exception):
    """A running service must end, and a retry would not help. The message is for the user."""


def readable_by_all(paths: Iterable[Path]) -> Iterator[str]:
    """A message for each file that every user of this machine can read."""
    for path in map(Path.absolute, paths):
        if any(path.is_relative_to(each) for each in SECRETS_OF_CONTAINERS):
            continue
        try:
            can_be_reached = all(each.stat().st_mode & stat.S_IXOTH for each in path.parents)
            is_open = can_be_reached and path.stat().st_mode & stat.S_IROTH
        except OSError:
            continue
        if is_open:
            yield f"{path} holds secrets, and every user of this machine can read it: chmod 600 {path}"


def service_main(
    prog: str,
    what: str,
    load: Callable[[], ConfigT],
    run: Callable[[ConfigT], None],
    log_fields: Callable[[ConfigT], dict[str, str]],
) -> int:
    """Runs a service: loads the configuration, sets up logging, calls `run`. `prog` and `what` name it in messages.

    Returns the exit status: 2 for an invalid configuration, 1 for a failed start or an error.
    """
    try:
        config = load()
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    setup_logging(config.log_level, config.log_format, **log_fields(config))
    config.log_values(log)
    for warning in (*variable_warnings(os.environ), *readable_by_all(config.secret_files)):
        log.warning("%s", warning)
    try:
        run(config)
    except StartFailed as error:
        log.error("the %s cannot start: %s", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return 1
    except ServiceEnds as error:
        log.error("the %s ends: %s", what, error)
        return 1
    except Exception:
        log.exception("the %s ends because of an error", what)
        return 1
    finally:
        gc.freeze()  # otherwise the interpreter scans all objects several times as it ends: a second of CPU with torch
    return 0


def die_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` that makes the kernel kill the child when the parent ends (Linux).

    Create and use it in the parent's main thread, because the kernel watches the thread that forked.
    """
    parent = os.getpid()

    def arm() -> None:
        end_with_parent(parent)

    return arm


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends (Linux). `parent` is the process that did;
    exits if that has ended already. Call it in the main thread, first of all."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def leave_at_once(status: int = 0) -> NoReturn:
    """Ends this process without waiting for its threads, and kills all that it has started (Linux)."""
    for child in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os._exit(status)


def _descendants(process: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def describe_exit(status: int, num_kills: int | None = None) -> str:
    """Text such as `exited with status 1` or `was killed by SIGKILL when memory ran out`. `num_kills`: what
    `num_memory_kills` returned before the process started."""
    if status == -signal.SIGKILL and num_kills is not None and num_memory_kills() > num_kills:
        return "was killed by SIGKILL when memory ran out"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@contextmanager
def deferred_collection() -> Iterator[None]:
    """Turns garbage collection off in the block. Imports of torch and transformers make half a million objects, and
    scanning them again and again takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle_garbage() -> None:
    """Exempts all present objects from garbage collection and makes collections rarer. Call it after start-up.

    Otherwise the collector scans some hundred thousand library objects each time, for tens of milliseconds, and finds
    nothing: objects of requests are freed by reference counts, except for a few cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop if it is installed, else None (asyncio's default)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


OTHER_FILES = 256
"""File descriptors for everything except peers and client connections: libraries, logs, Redis, pages."""
FILES_PER_PEER = 3
"""The connections in both directions, and the event descriptor of the socket that sends."""
FILES_PER_TRANSFER_PEER = 2
"""The same for KV blocks, which travel in one direction."""


class TooFewOpenFiles(ValueError):
    """The hard limit of open files is below what the configuration needs. The message is for the user."""


def allow_open_files(wanted: int | None) -> int:
    """Raises the soft limit to `wanted` if it is lower, as far as the hard limit allows; None: to the hard limit.

    Returns the soft limit then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or (wanted is not None and soft >= wanted):
        return wanted if wanted is not None else soft
    if hard == resource.RLIM_INFINITY:
        new = wanted if wanted is not None else hard
    else:
        new = hard if wanted is None else min(wanted, hard)
    if new != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    return new


def files_for_peers(max_peers: int, *, transfers_blocks: bool) -> int:
    """File descriptors that connections to this many peers may take."""
    return max_peers * (FILES_PER_PEER + (FILES_PER_TRANSFER_PEER if transfers_blocks else 0))


def allow_peers(max_peers: int, *, transfers_blocks: bool) -> None:
    """Raises the soft limit for this many peers. Raises TooFewOpenFiles if the hard limit is too low."""
    needed = OTHER_FILES + files_for_peers(max_peers, transfers_blocks=transfers_blocks)
    limit = allow_open_files(needed)
    if limit < needed:
        per_peer = files_for_peers(1, transfers_blocks=transfers_blocks)
        raise TooFewOpenFiles(
            f"max_peers = {max_peers} needs {needed} open files, and the hard limit of this process is {limit}: raise "
            f"it (ulimit -Hn, LimitNOFILE= of systemd, --ulimit of Docker) or set max_peers to at most "
            f"{max(0, (limit - OTHER_FILES) // per_peer)}"
        )


class HeldPort:
    """Reserves a port for a server that starts later: until `release`, the system does not assign it as a free port.

    The socket is bound and never listens. On Linux a server with SO_REUSEADDR (Redis, libzmq, asyncio, the router) can
    still bind the port and receives its connections; without a server they are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Reserves this port, or any free one for 0. Raises OSError if it cannot be bound."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Ends the reservation. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
