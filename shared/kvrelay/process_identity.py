"""Identifies a process, so that other processes on its machine can tell whether it has ended.

Process ids are reused, so the identity also contains the start time. Boot id and pid namespace tell whether the asking
process could see it at all; if they differ, the answer is unknown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

IDENTITY_PATTERN = "([!-.0-~]{1,128})/([0-9]{1,10})/([0-9]{1,20})"
"""Boot id and pid namespace, process id, start time."""
MOST_IDENTITY_CHARS = 128 + 1 + 10 + 1 + 20

_PROC = Path("/proc")
_MOST_PROCESS_ID = 2**31 - 1
_STATE, _START_TIME = 0, 19  # indexes of the fields of /proc/PID/stat after the name, see proc(5)
_ENDED = frozenset("ZX")


class _Process(NamedTuple):
    machine: str
    process_id: int
    start_time: str


def identity_of(process_id: int) -> str:
    """Machine, process id and start time.

    Empty if unavailable (not Linux, no permission, /proc of another pid namespace) or the process has ended.
    """
    try:
        fields = _stat(process_id)
        identity = f"{_machine()}/{process_id}/{fields[_START_TIME]}" if fields else ""
    except OSError:
        return ""
    return identity if _parse(identity) is not None else ""


def own_identity() -> str:
    return identity_of(os.getpid())


def has_ended(identity: str) -> bool:
    """Returns whether all threads of that process have ended. False also if that is unknown."""
    process = _parse(identity)
    try:
        return process is not None and process.machine == _machine() and _is_gone(process)
    except OSError:  # such as missing permission, or no free file descriptor
        return False


def can_be_seen(identity: str) -> bool:
    """Whether the process runs, or ran, in this machine's boot and pid namespace. False for an invalid identity.

    If so, `has_ended` answers, unless /proc hides the process (mount option hidepid) and its id is in use.
    """
    process = _parse(identity)
    try:
        return process is not None and process.machine == _machine()
    except OSError:
        return False


def running_process_id(identity: str) -> int | None:
    """The process's id. None if it has ended, or cannot be seen here."""
    process = _parse(identity)
    return process.process_id if process is not None and identity_of(process.process_id) == identity else None


def _parse(identity: str) -> _Process | None:
    """None for what `identity_of` does not return. Identities come from peers and from Redis."""
    match = re.fullmatch(IDENTITY_PATTERN, identity)
    if match is None:
        return None
    machine, process_id, start_time = match.groups()
    return _Process(machine, int(process_id), start_time) if 0 < int(process_id) <= _MOST_PROCESS_ID else None


def _machine() -> str:
    """Raises OSError if there is no /proc, or it shows another pid namespace: its process ids are not those here."""
    if os.readlink(_PROC / "self") != str(os.getpid()):
        raise FileNotFoundError(f"{_PROC} shows another pid namespace")
    boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.readlink(_PROC / 'self/ns/pid')}"


def _is_gone(process: _Process) -> bool:
    """Raises OSError if that cannot be read."""
    fields = _stat(process.process_id)
    if not fields:
        return not _exists(process.process_id)
    if fields[_START_TIME] != process.start_time:
        return True
    return fields[_STATE] in _ENDED and _num_threads(process.process_id) <= 1


def _exists(process_id: int) -> bool:
    """Also for processes that /proc does not show (mount option hidepid)."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stat(process_id: int) -> list[str]:
    try:
        return (_PROC / str(process_id) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _num_threads(process_id: int) -> int:
    """Number of threads. A process whose first thread ended shows as a zombie while others run."""
    try:
        return len(os.listdir(_PROC / str(process_id) / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
