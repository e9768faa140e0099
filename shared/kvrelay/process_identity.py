"""A name for a process by which others on its machine can tell that it has ended.

A process id alone is reused; together with the start time it is not. The boot and the namespace of process ids say
whether whoever asks would see the process at all: where they differ, nothing can be said.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _START_TIME = 0, 19  # of the fields of /proc/PID/stat behind the name, see proc(5)
_ENDED = frozenset("ZX")


def identity_of(process_id: int) -> str:
    """Machine, process id and start time; empty where the system does not tell (no Linux), or it has ended."""
    fields = _stat(process_id)
    try:
        return "/".join([_machine(), str(process_id), fields[_START_TIME]]) if fields else ""
    except OSError:
        return ""


def own_identity() -> str:
    """Of this process."""
    return identity_of(os.getpid())


def has_ended(identity: str) -> bool:
    """Whether none of that process's threads can run any more. False also where that cannot be known."""
    if not can_be_seen(identity):
        return False
    _, process_id, start_time = identity.split("/")
    fields = _stat(int(process_id))
    if not fields or fields[_START_TIME] != start_time:
        return True
    return fields[_STATE] in _ENDED and _num_threads(int(process_id)) <= 1


def can_be_seen(identity: str) -> bool:
    """Whether `has_ended` could tell about that process: it is, or was, where this one would see it."""
    machine, _, rest = identity.partition("/")
    try:
        return rest.partition("/")[0].isdecimal() and machine == _machine()
    except OSError:
        return False


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()}:{_NAMESPACE.readlink()}"


def _stat(process_id: int) -> list[str]:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _num_threads(process_id: int) -> int:
    """A first thread that has ended shows as a zombie while others still run."""
    try:
        return len(os.listdir(f"/proc/{process_id}/task"))
    except OSError:
        return 0
