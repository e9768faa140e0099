"""Writes runs of bytes into the memory of another process on this machine, up to 1024 with one system call.

UCX makes one `process_vm_writev` for each run. For runs of 8 to 16 KiB, the heads of one rank in a row of a block, the
calls then take most of the time. The other process must permit it as it permits UCX (see docs/nixl.md).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import select
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.process_identity import running_process_id

Addresses = NDArray[np.uint64]

_MOST_RUNS = 1024
"""Linux's UIO_MAXIOV."""


class ProcessMemory:
    """The memory of another process. One thread at a time may use it.

    `process`: the identity of the process. Raises OSError if it has ended or is not visible here.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._exit: select.poll | None = None
        self._exit_file: int | None = None
        process_id = running_process_id(process)
        if process_id is None:
            raise self._ended()
        self._process_id = process_id
        try:
            self._watch_exit()
        except OSError:
            self.close()
            raise

    def _watch_exit(self) -> None:
        """Process ids are reused. A file that is readable once the process has ended costs a microsecond to ask, the
        process's identity a hundred, and half a millisecond if other threads want the interpreter."""
        try:
            self._exit_file = os.pidfd_open(self._process_id)
        except (AttributeError, OSError):  # Linux before 5.3, or sandboxes: the identity is read before each write
            return
        # The file may be that of a process that got the id after the first look, so the identity is compared again.
        if running_process_id(self._process) is None:
            raise self._ended()
        self._exit = select.poll()
        self._exit.register(self._exit_file, select.POLLIN)

    def write(self, sources: Addresses, targets: Addresses, num_bytes: int) -> None:
        """Copies `num_bytes` from each address here to the address in the same place there.

        All bytes are there when this returns. Does not hold the GIL. Raises OSError: the process has ended, forbids it,
        or has no memory there; some runs may be written then.
        """
        if self._has_ended():
            raise self._ended()
        if not len(sources):
            return
        local, remote = _iovecs(sources, num_bytes), _iovecs(targets, num_bytes)
        num_left = len(sources)
        for ours, theirs in zip(local, remote, strict=True):
            _write(self._process_id, ours, theirs, min(_MOST_RUNS, num_left) * num_bytes)
            num_left -= _MOST_RUNS

    def close(self) -> None:
        """Nothing can be written afterwards. Idempotent."""
        self._exit, exit_file, self._exit_file = None, self._exit_file, None
        self._process = ""
        if exit_file is not None:
            os.close(exit_file)

    def _has_ended(self) -> bool:
        return bool(self._exit.poll(0)) if self._exit is not None else running_process_id(self._process) is None

    def _ended(self) -> ProcessLookupError:
        return ProcessLookupError(errno.ESRCH, f"no process {self._process!r} here")


def _write(process_id: int, local: Addresses, remote: Addresses, num_bytes: int) -> None:
    written = _system_call()(process_id, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if written < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"process_vm_writev: {os.strerror(code)}")
    if written != num_bytes:
        raise OSError(errno.EFAULT, f"process_vm_writev wrote {written} of {num_bytes} bytes")


def _iovecs(addresses: Addresses, num_bytes: int) -> list[Addresses]:
    """`struct iovec` for the addresses in their order, [runs, 2], for each `_MOST_RUNS` of them. Neighbours become one,
    since Linux locks the pages of each run of the other process for itself."""
    is_start = np.empty(len(addresses), np.bool_)
    np.not_equal(addresses[1:] - addresses[:-1], np.uint64(num_bytes), out=is_start[1:])
    is_start[::_MOST_RUNS] = True
    starts = np.flatnonzero(is_start)
    rows = np.empty((len(starts), 2), np.uint64)
    rows[:, 0] = addresses[starts]
    rows[:-1, 1] = starts[1:] - starts[:-1]
    rows[-1, 1] = len(addresses) - starts[-1]
    rows[:, 1] *= np.uint64(num_bytes)
    if len(addresses) <= _MOST_RUNS:
        return [rows]
    cuts = np.searchsorted(starts, range(0, len(addresses), _MOST_RUNS)).tolist()
    return [rows[first:last] for first, last in itertools.pairwise([*cuts, len(rows)])]


@cache
def _system_call() -> Any:
    """Raises OSError if this system has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system has no process_vm_writev") from error
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return call
