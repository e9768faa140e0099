"""The memory of a pool for transports: read and written in place on a host, through staging buffers on a device.

`HostPool` is an array. A pool in an accelerator's memory is `engine.run.device_pool.DevicePool`; transports know
neither torch nor CUDA.

A block is `[layer, 2, kv_head, token, dim]`, so it has two rows for each layer, its keys and its values. A part of it
is the KV of some layers and heads: a range of layers is a range of rows, and a range of heads is a run of bytes in each
row. All rows have the same length, and the runs lie at the same place in each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvrelay.handoff.transports.wire import Bytes, Checksums, Indices

Segment = Literal["DRAM", "VRAM"]
"""A host's memory or an accelerator's, as NIXL calls them."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """`num_rows` of a block's `block_rows` rows of `row_bytes`, from `first_row` on, and of each of them `num_bytes`
    from `first_byte` on.

    Raises ValueError for rows outside a block, and bytes outside a row.
    """

    block_rows: int
    row_bytes: int
    first_row: int
    num_rows: int
    first_byte: int
    num_bytes: int

    def __post_init__(self) -> None:
        has_rows = self.first_row >= 0 and 0 < self.num_rows <= self.block_rows - self.first_row
        has_bytes = self.first_byte >= 0 and 0 < self.num_bytes <= self.row_bytes - self.first_byte
        if not has_rows or not has_bytes:
            raise ValueError(f"no part of a block: {self}")

    @property
    def size(self) -> int:
        """The bytes of the part."""
        return self.num_rows * self.num_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of the whole block."""
        return self.block_rows * self.row_bytes

    @property
    def is_whole(self) -> bool:
        return self.size == self.block_bytes

    @property
    def has_whole_rows(self) -> bool:
        """True if the part is a range of rows, and so a single run of bytes."""
        return self.num_bytes == self.row_bytes

    def as_run(self) -> BlockPart:
        """The same bytes as a part with one row, if it has whole rows."""
        return BlockPart(1, self.block_bytes, 0, 1, self.first_row * self.row_bytes, self.size)


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part of the sender's blocks that becomes a part of the receiver's. `number`: of the parts admitted there."""

    number: int
    source: BlockPart
    target: BlockPart

    def __post_init__(self) -> None:
        if (self.source.num_rows, self.source.num_bytes) != (self.target.num_rows, self.target.num_bytes):
            raise ValueError(f"{self.source} has not the shape of {self.target}")

    def runs(self) -> tuple[BlockPart, BlockPart]:
        """Source and target, the rows of which are the runs to copy: a single one where both have whole rows, as
        between stages and between equal sizes."""
        if self.source.has_whole_rows and self.target.has_whole_rows:
            return self.source.as_run(), self.target.as_run()
        return self.source, self.target


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
