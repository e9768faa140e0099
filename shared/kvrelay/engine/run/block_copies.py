"""Copies of the pool's blocks: to and from the host's swap space, from block to block, and for transports.

The swap space has one slot per block, in pinned memory if the pool lies on an accelerator. On a CPU the pool is host
memory too, and the slots are plain memory whose pages are allocated at the first write. Blocks that are neighbours in
both pool and slots are copied as one run; a block of all layers is contiguous in both.

One-sided transports get the address of a pool on an accelerator. Others go through pinned host memory on a stream of
their own, so that a copy runs beside the forward and waits for nothing else. A block is read after the step that wrote
it has landed, and used after `scatter` has returned, so the streams need no events between them.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any

import numpy as np
import torch

from kvrelay.backends.backend import bits
from kvrelay.engine.run.device import to_device, use_on_this_thread
from kvrelay.handoff.transports.pool_memory import BlockPart, Segment
from kvrelay.handoff.transports.wire import Bytes, Indices
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

        Returns the seconds that the copies took. Raises IndexError for a block or slot that does not exist.
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


_BUFFER_BYTES = 8 << 20  # buffer size of `rows` and `scatter`, whose callers bring none


class DevicePool:
    """`PoolMemory` over `pool`, which is contiguous and whose first dimension is the block."""

    def __init__(self, pool: torch.Tensor) -> None:
        as_bytes = pool.view(pool.shape[0], -1).view(torch.uint8)
        self.num_blocks, self.block_bytes = as_bytes.shape
        self._blocks = _widest(as_bytes)
        self.segment: Segment = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self._device = pool.device
        self._is_cuda = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if self._is_cuda else None
        self._lock = Lock()  # guards the staging buffer
        self.address = self._blocks.data_ptr()
        self.device_id = pool.device.index or 0
        self._own_buffer = self.buffer(max(1, _BUFFER_BYTES // self.block_bytes))

    def enter_thread(self) -> None:
        use_on_this_thread(self._device)

    def view(self, first: int, count: int) -> Bytes | None:
        """Returns None: the host cannot read the pool in place."""
        return None

    def buffer(self, num_blocks: int) -> Bytes:
        """Returns pinned memory."""
        shape = (num_blocks, self.block_bytes)
        memory: Bytes = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda).numpy()
        return memory

    def gather(self, blocks: Indices, out: Bytes, part: BlockPart | None = None) -> None:
        """See `PoolMemory.gather`. Several blocks are copied as one transfer."""
        with self._on_stream():
            found = self._runs(part).index_select(0, self._indices(blocks)).flatten(1)
            torch.from_numpy(out[: len(blocks)]).view(found.dtype).copy_(found, non_blocking=True)
        self._wait()

    def scatter(self, slots: Indices, rows: Bytes, part: BlockPart | None = None) -> None:
        runs, buffer = self._runs(part), self._rows_of_buffer(part)
        with self._lock:
            for first in range(0, len(slots), len(buffer)):
                some = slots[first : first + len(buffer)]
                filled = buffer[: len(some)]
                filled[:] = rows[first : first + len(some)]
                with self._on_stream():
                    moved = torch.from_numpy(filled).to(self._device, non_blocking=True).view(runs.dtype)
                    runs.index_copy_(0, self._indices(some), moved.view(len(some), *runs.shape[1:]))
                self._wait()

    def rows(self, blocks: Indices, part: BlockPart | None = None) -> Iterator[Bytes]:
        buffer = self._rows_of_buffer(part)
        with self._lock:
            for first in range(0, len(blocks), len(buffer)):
                some = blocks[first : first + len(buffer)]
                self.gather(some, buffer, part)
                yield from buffer[: len(some)]

    def _runs(self, part: BlockPart | None) -> torch.Tensor:
        """A view of the blocks, [num_blocks, words], or of a part of each, [num_blocks, num_rows, words]."""
        if part is None:
            return self._blocks
        is_in_words = part.row_bytes % 8 == part.first_byte % 8 == part.num_bytes % 8 == 0
        blocks = self._blocks if is_in_words else self._blocks.view(torch.uint8)
        word = blocks.element_size()
        by_row = blocks.view(self.num_blocks, part.block_rows, part.row_bytes // word)
        return by_row.narrow(1, part.first_row, part.num_rows).narrow(
            2, part.first_byte // word, part.num_bytes // word
        )

    def _rows_of_buffer(self, part: BlockPart | None) -> Bytes:
        """The staging buffer, with a block or part in each row."""
        if part is None:
            return self._own_buffer
        count = self._own_buffer.size // part.size
        return self._own_buffer.reshape(-1)[: count * part.size].reshape(count, part.size)

    def _indices(self, blocks: Indices) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(blocks, np.int64)).to(self._device, non_blocking=True)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _widest(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in eight-byte words if the block size allows: gather kernels work element by element."""
    has_words = blocks.shape[1] % 8 == 0 and blocks.storage_offset() % 8 == 0
    return blocks.view(torch.int64) if has_words else blocks
