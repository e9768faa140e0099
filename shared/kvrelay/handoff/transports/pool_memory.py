"""The memory of a pool for transports: read and written in place on a host, through staging buffers on a device.

`HostPool` is an array. A pool in an accelerator's memory is `engine.run.device_pool.DevicePool`; transports know
neither torch nor CUDA.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import numpy as np

from kvrelay.handoff.transports.block_parts import BlockPart
from kvrelay.handoff.transports.wire import Bytes, Checksums, Indices

Segment = Literal["DRAM", "VRAM"]
"""A host's memory or an accelerator's, as NIXL calls them."""


class PoolMemory(Protocol):
    """`num_blocks` contiguous blocks of `block_bytes` bytes, starting at `address`.

    Safe to use from several threads. Reads and writes are complete when a method returns.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def segment(self) -> Segment: ...

    @property
    def device_id(self) -> int:
        """The index of the accelerator; 0 for a host."""
        ...

    def enter_thread(self) -> None:
        """Called first on each thread that uses the pool, or a library that reads and writes it by its address."""
        ...

    def view(self, first: int, count: int) -> Bytes | None:
        """Neighbouring blocks where they lie, [count, block_bytes]; None where the host cannot read them in place."""
        ...

    def buffer(self, num_blocks: int) -> Bytes:
        """Host memory to gather into, [num_blocks, block_bytes], of the kind that copies fastest."""
        ...

    def gather(self, blocks: Indices, out: Bytes, part: BlockPart | None = None) -> None:
        """Copies blocks, or a part of each, into the first rows of `out`. The caller has checked that they are there.

        A row of `out` has as many bytes as a block or part.
        """
        ...

    def scatter(self, slots: Indices, rows: Bytes, part: BlockPart | None = None) -> None:
        """Copies rows into blocks, or into a part of each. The caller has checked that they are there."""
        ...

    def rows(self, blocks: Indices, part: BlockPart | None = None) -> Iterator[Bytes]:
        """Yields the bytes of each block or part, contiguous. Each is valid only until the next one is taken."""
        ...


class HostPool:
    """`PoolMemory` over a C-contiguous uint8 array of shape [num_blocks, block_bytes].

    Raises ValueError for another kind of array.
    """

    segment: Segment = "DRAM"
    device_id = 0

    def __init__(self, memory: Bytes) -> None:
        if memory.ndim != 2 or not memory.flags.c_contiguous or not memory.size:
            raise ValueError("a pool is a C-contiguous array of shape [num_blocks, block_bytes], and not empty")
        self._memory = memory
        self.num_blocks, self.block_bytes = memory.shape
        self.address = int(memory.ctypes.data)

    @property
    def is_writable(self) -> bool:
        """True if `scatter` may be called."""
        return self._memory.flags.writeable

    def enter_thread(self) -> None:
        """Any thread may read and write a host's memory."""

    def view(self, first: int, count: int) -> Bytes | None:
        return self._memory[first : first + count]

    def buffer(self, num_blocks: int) -> Bytes:
        return np.empty((num_blocks, self.block_bytes), np.uint8)

    def gather(self, blocks: Indices, out: Bytes, part: BlockPart | None = None) -> None:
        if part is None:
            # mode="clip" writes straight into `out`; "raise" would copy once more.
            np.take(self._memory, blocks, axis=0, out=out[: len(blocks)], mode="clip")
            return
        runs = self._runs(part)
        for row, block in enumerate(blocks.tolist()):
            np.copyto(out[row].reshape(part.num_rows, part.num_bytes), runs[block])

    def scatter(self, slots: Indices, rows: Bytes, part: BlockPart | None = None) -> None:
        if part is not None:
            runs = self._runs(part)
            for row, slot in enumerate(slots.tolist()):
                np.copyto(runs[slot], rows[row].reshape(part.num_rows, part.num_bytes))
            return
        first, last = int(slots[0]), int(slots[-1])
        if last - first + 1 == slots.size and (np.diff(slots) == 1).all():
            self._memory[first : last + 1] = rows
        else:
            self._memory[slots] = rows

    def rows(self, blocks: Indices, part: BlockPart | None = None) -> Iterator[Bytes]:
        if part is None:
            return (self._memory[block] for block in blocks.tolist())
        runs = self._runs(part)
        return (np.ascontiguousarray(runs[block]).reshape(-1) for block in blocks.tolist())

    def _runs(self, part: BlockPart) -> Bytes:
        """A view of the part of all blocks, [num_blocks, num_rows, num_bytes]."""
        by_row = self._memory.reshape(self.num_blocks, part.block_rows, part.row_bytes)
        rows = slice(part.first_row, part.first_row + part.num_rows)
        return by_row[:, rows, part.first_byte : part.first_byte + part.num_bytes]


PoolLike = Bytes | PoolMemory


def as_pool(memory: PoolLike, *, writable: bool = False) -> PoolMemory:
    """The pool itself, or one over an array. Raises ValueError for an array of another kind."""
    if not isinstance(memory, np.ndarray):
        return memory
    pool = HostPool(memory)
    if writable and not pool.is_writable:
        raise ValueError("a pool that takes blocks is a writable array")
    return pool


class PoolChecksums:
    """Checksums of the blocks of a pool, or of an array that `as_pool` accepts. The blocks are read in place."""

    def __init__(self, pool: PoolLike) -> None:
        self._pool = as_pool(pool)

    def of(self, blocks: Indices, part: BlockPart | None = None) -> Checksums:
        """Of blocks, or of a part of each: uint32 of shape [num_blocks], in the order of `blocks`. Reads them all: not
        for an event loop."""
        return checksums_of(self._pool.rows(blocks, part))


def checksums_of(rows: Iterable[Bytes]) -> Checksums:
    """One CRC-32 per row; rows are contiguous."""
    return np.fromiter((zlib.crc32(row.data) for row in rows), np.uint32)
