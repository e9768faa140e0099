"""A pool in an accelerator's memory, as transports see it.

One-sided transports get its address. Others stage through pinned host memory on a stream of their own, so that a copy
runs beside the forward and waits for nothing else. A block is read after the step that wrote it has landed, and used
after `scatter` has returned, so the streams need no events between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import numpy as np
import torch

from kvrelay.engine.run.device import use_on_this_thread
from kvrelay.handoff.transports.pool_memory import BlockPart, Segment
from kvrelay.handoff.transports.wire import Bytes, Indices

_STAGING_BYTES = 8 << 20  # buffer size of `rows` and `scatter`, whose callers bring none


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
        self._staged = self.buffer(max(1, _STAGING_BYTES // self.block_bytes))

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
                staged = buffer[: len(some)]
                staged[:] = rows[first : first + len(some)]
                with self._on_stream():
                    moved = torch.from_numpy(staged).to(self._device, non_blocking=True).view(runs.dtype)
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
            return self._staged
        count = self._staged.size // part.size
        return self._staged.reshape(-1)[: count * part.size].reshape(count, part.size)

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
