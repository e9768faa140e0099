"""Writes runs of bytes into the memory of another process on this machine, up to 1024 with one system call.

UCX makes one `process_vm_writev` for each run. For runs of 8 to 16 KiB, the heads of one rank in a row of a block, the
calls then take most of the time. The other process must permit it as it permits UCX (see docs/nixl.md).
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.process_identity import running_process_id

Addresses = NDArray[np.uint64]

_MOST_RUNS = 1024
"""Linux's UIO_MAXIOV."""


def write_runs(process: str, sources: Addresses, targets: Addresses, num_bytes: int) -> None:
    """Copies `num_bytes` from each address here to the address in the same place there.

    `process`: the identity of the other process. All bytes are there when this returns. Does not hold the GIL. Raises
    OSError: the process has ended or is not visible here, forbids it, or has no memory there; some runs may be written
    then.
    """
    process_id = running_process_id(process)
    if process_id is None:
        raise ProcessLookupError(errno.ESRCH, f"no process {process} here")
    for first in range(0, len(sources), _MOST_RUNS):
        runs = slice(first, first + _MOST_RUNS)
        _write(process_id, _iovecs(sources[runs], num_bytes), _iovecs(targets[runs], num_bytes))


def _write(process_id: int, local: Addresses, remote: Addresses) -> None:
    wanted = int(remote[:, 1].sum())
    written = _system_call()(process_id, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if written < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"process_vm_writev: {os.strerror(code)}")
    if written != wanted:
        raise OSError(errno.EFAULT, f"process_vm_writev wrote {written} of {wanted} bytes")


def _iovecs(addresses: Addresses, num_bytes: int) -> Addresses:
    """`struct iovec` for the addresses in their order, [runs, 2]. Neighbours become one, since Linux locks the pages of
    each run of the other process for itself."""
    starts = np.flatnonzero(np.append(True, np.diff(addresses) != num_bytes))
    rows = np.empty((len(starts), 2), np.uint64)
    rows[:, 0] = addresses[starts]
    rows[:, 1] = np.diff(starts, append=len(addresses)) * num_bytes
    return rows


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
