"""Memory of the host: in huge pages, for what a step reads from end to end (with pages of 4 KiB, translating their
addresses takes a third of the time in a virtual machine, where each translation goes through two page tables), taken in
advance for a pool, and given back after a load."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from contextlib import suppress

import torch

from kvrelay.machine_memory import available_memory_bytes

HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 16 << 20
_ALIGNMENT = 64


def huge_page_memory(num_bytes: int) -> torch.Tensor:
    """Returns `[num_bytes]` uint8 zeros that begin at a huge page, and are in huge pages where the system has them.
    Pages take memory once they are written."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not every kernel has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


class HugePages:
    """Puts tensors side by side into huge pages, as most are smaller than one or fill the last one in part. A chunk of
    them is released once none of its tensors is in use."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of a tensor on the CPU. One on the meta device, which has no memory, stays."""
        if tensor.is_meta:
            return tensor
        size = tensor.nbytes
        if size >= _CHUNK_BYTES:
            memory = huge_page_memory(size)
        else:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = huge_page_memory(_CHUNK_BYTES), 0
            memory = self._chunk[self._used : self._used + size]
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def release_freed_memory() -> None:
    """Returns to the system what the C library keeps of freed memory, of all threads. It keeps pieces below 32 MiB:
    after a model was packed, which frees its weights one by one, as much again as the model. Without glibc: nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
