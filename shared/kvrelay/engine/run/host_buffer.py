"""The host's swap space: one slot per block, in pinned memory if the pool lies on an accelerator.

On a CPU the pool is host memory too, and the buffer is plain memory whose pages are allocated at the first write.
Blocks that are neighbours in both pool and buffer are copied as one run; a block of all layers is contiguous in both.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvrelay.backends.backend import bits
from kvrelay.engine.run.device import to_device
from kvrelay.step.batch import HostCopies, WorkerBatch

log = logging.getLogger(__name__)

_MEASURED_BLOCKS = 16


class HostBuffer:
    """`num_slots` slots beside a pool whose first dimension is the block. Copies run on the caller's thread."""

    def __init__(self, pool: torch.Tensor, num_slots: int) -> None:
        """Raises ValueError if there is not enough memory."""
        self._pool = pool.view(pool.shape[0], -1)
        self._pinned = pool.device.type == "cuda"
        shape = (num_slots, self._pool.shape[1])
        try:
            if self._pinned:
                self._slots = pinned_memory(shape, pool.dtype, pool.device)
            else:
                self._slots = torch.empty(shape, dtype=pool.dtype)
        except (RuntimeError, OSError) as error:
            num_bytes = shape[0] * shape[1] * pool.element_size()
            raise ValueError(f"swap_space: the host does not give {num_bytes} bytes of memory ({error})") from error

    def copy(self, batch: WorkerBatch) -> float:
        """Makes all copies of a step, in its order. Returns the seconds of those between pool and host."""
        copy_s = self.swap(batch.to_host, batch.from_host)
        if batch.copies:  # every source is read before any target is written
            sources = to_device(np.array([copy.source for copy in batch.copies], np.int64), self._pool.device)
            targets = to_device(np.array([copy.target for copy in batch.copies], np.int64), self._pool.device)
            pool = bits(self._pool)
            pool.index_copy_(0, targets, pool.index_select(0, sources))
        return copy_s

    def swap(self, out: HostCopies, back: HostCopies) -> float:
        """Copies the blocks of `out` from the pool to host slots, then those of `back` from host slots into the pool.

        Returns the seconds that the copies took.

        Raises:
            IndexError: a block or slot does not exist.
        """
        if not out.blocks and not back.blocks:
            return 0.0
        started = time.perf_counter()
        self._check(out)
        self._check(back)
        # Copies on one stream keep their order, and the forward comes behind them. Only the time measurement below
        # waits.
        for block, slot, length in _runs(out):
            self._slots[slot : slot + length].copy_(self._pool[block : block + length], non_blocking=self._pinned)
        for block, slot, length in _runs(back):
            self._pool[block : block + length].copy_(self._slots[slot : slot + length], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(self._pool.device).synchronize()
        return time.perf_counter() - started

    def measure(self) -> float:
        """Measures the seconds to copy a block one way. Leaves the pool's content unchanged. Returns 0
        without slots."""
        count = min(len(self._slots), len(self._pool), _MEASURED_BLOCKS)
        if not count:
            return 0.0
        copies = HostCopies(tuple(range(count)), tuple(range(count)))
        self.swap(copies, copies)  # warm-up: the first write to a host page allocates it
        return self.swap(copies, copies) / (2 * count)

    def _check(self, copies: HostCopies) -> None:
        for name, ids, limit in (("block", copies.blocks, len(self._pool)), ("slot", copies.slots, len(self._slots))):
            if ids and (min(ids) < 0 or max(ids) >= limit):
                raise IndexError(f"{name}s from {min(ids)} to {max(ids)}, but there are {limit}")


def _runs(copies: HostCopies) -> Iterator[tuple[int, int, int]]:
    """Yields (block, slot, length) of the longest runs that are contiguous on both sides."""
    start = 0
    blocks, slots = copies
    for end in range(1, len(blocks) + 1):
        if end < len(blocks) and blocks[end] == blocks[end - 1] + 1 and slots[end] == slots[end - 1] + 1:
            continue
        yield blocks[start], slots[start], end - start
        start = end


def pinned_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros in pinned memory, for asynchronous copies to and from this GPU. The pages are unpinned when the
    tensor is collected.

    torch's allocator rounds pinned memory up to a power of two: for a swap space of 20 GiB it would pin 32
    (pytorch/pytorch issue 95823). So pages are mapped here and registered with the driver.

    Falls back to torch's allocator if the driver does not pin mapped pages. Raises RuntimeError or OSError if there is
    not enough memory.
    """
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not size_bytes:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=dtype)
    with torch.cuda.device(device):
        api: Any = torch.cuda.cudart()
        status = int(api.cudaHostRegister(flat.data_ptr(), size_bytes, 0))
    if status:
        log.info("the driver does not pin mapped memory (CUDA error %d): torch pins it, in powers of two", status)
        _forget_last_error(device)
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    # Pages must be unpinned before they go back to the system. At process exit the system does both, and CUDA may be
    # gone before a finalizer would run.
    weakref.finalize(flat.untyped_storage(), _unpin, api, flat.data_ptr(), pages).atexit = False
    return flat.view(shape)


def _forget_last_error(device: torch.device) -> None:
    """Clears the runtime's last error. torch checks it after its next kernel, and would report that kernel as failed.

    An error that persists was not caused by pinning, and is reported again.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _unpin(api: Any, address: int, pages: mmap.mmap) -> None:
    """Unpins the pages. The argument keeps them alive until now."""
    api.cudaHostUnregister(address)
