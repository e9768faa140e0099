"""Takes a pool's pages from the system before tokens need them.

The first write to a page waits for the system, which clears it: 75 ms for 512 tokens of Qwen3-0.6B's shape where the
host of a virtual machine must find memory too, a quarter of their step.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref

import torch

from kvrelay.machine_memory import available_memory_bytes

log = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which the mmap module does not name
_SLICE_BYTES = 8 << 20
"""While a slice is populated, other threads wait if they map or release memory: a few milliseconds at most."""
_LEAST_FREE_BYTES = 2 << 30
_PAGE_BYTES = 4096


def populate_in_background(pool: torch.Tensor) -> threading.Thread:
    """Starts a thread that takes all pages of a pool on the CPU, and leaves what they contain. It ends early if the
    pool is dropped, if less than `_LEAST_FREE_BYTES` would be free, and where the system can't do it: pages are taken
    as they are written then."""
    address, num_bytes = pool.data_ptr(), pool.nbytes
    thread = threading.Thread(
        target=_populate, args=(weakref.ref(pool), address, num_bytes), name="populate", daemon=True
    )
    thread.start()
    return thread


def _available_bytes() -> int:
    """0 where the system does not say."""
    try:
        return available_memory_bytes()
    except OSError:
        return 0


def _populate(pool: weakref.ref[torch.Tensor], address: int, num_bytes: int) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = address - address % _PAGE_BYTES
    while begin < address + num_bytes:
        alive = pool()
        if alive is None:
            return
        size = min(_SLICE_BYTES, address + num_bytes - begin)
        if _available_bytes() < _LEAST_FREE_BYTES + size:
            log.info(
                "%d MiB of the pool take no memory until they are used: little is free",
                (address + num_bytes - begin) >> 20,
            )
            return
        if madvise(begin, size, _POPULATE_WRITE) != 0:
            log.debug("pages of the pool are taken as they are written: error %d", ctypes.get_errno())
            return
        begin += size
