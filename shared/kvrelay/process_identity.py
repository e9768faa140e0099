"""Identifies a process, so that other processes on its machine can tell whether it has ended.

Process ids are reused, so the identity also contains the start time. Boot id and pid namespace tell whether the asking
process could see it at all; if they differ, the answer is unknown.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _START_TIME = 0, 19  # indexes of the fields of /proc/PID/stat after the name, see proc(5)
_ENDED = frozenset("ZX")


def identity_of(process_id: int) -> str:
    """Machine, process id and start time; empty if unavailable (not Linux) or the process has ended."""
    fields = _stat(process_id)
    try:
        return "/".join([_machine(), str(process_id), fields[_START_TIME]]) if fields else ""
    except OSError:
        return ""


def own_identity() -> str:
    return identity_of(os.getpid())


def has_ended(identity: str) -> bool:
    """Whether all threads of that process have ended. False also if that is unknown."""
    if not can_be_seen(identity):
        return False
    _, process_id, start_time = identity.split("/")
    fields = _stat(int(process_id))
    if not fields or fields[_START_TIME] != start_time:
        return True
    return fields[_STATE] in _ENDED and _num_threads(int(process_id)) <= 1


def can_be_seen(identity: str) -> bool:
    """Whether `has_ended` can answer: the process runs, or ran, in this machine's boot and pid namespace."""
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
    """Number of threads. A process whose first thread ended shows as a zombie while others run."""
    try:
        return len(os.listdir(f"/proc/{process_id}/task"))
    except OSError:
        return 0
