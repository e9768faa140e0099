"""Cuts a push into pieces of about one frame each: pure arithmetic over arrays of block ids.

A piece whose blocks are contiguous in the pool is sent in place. The blocks of other pieces are gathered first, which
is cheaper than a frame per run while runs are short: a frame costs about as much as copying 256 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.handoff.transports.base import BlockPush
from kvrelay.handoff.transports.block_parts import PartCopy
from kvrelay.handoff.transports.wire import Bytes, Indices


@dataclass(frozen=True, slots=True)
class FrameSizes:
    """`frame_bytes`: what a data frame should hold. `direct_bytes`: from which size on a run is sent without a copy."""

    frame_bytes: int = 1 << 20
    direct_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The copies of a push as int64 columns of shape [num_blocks]: prompt index, block at the sender, slot."""

    indices: Indices
    sources: Indices
    slots: Indices

    @staticmethod
    def of(copies: Sequence[BlockPush], num_blocks: int) -> Copies:
        """Raises ValueError for a source outside the pool, and for numbers the header cannot carry."""
        flat = np.fromiter(
            (number for copy in copies for number in (copy.index, copy.source, copy.slot)), np.int64, 3 * len(copies)
        )
        columns = np.ascontiguousarray(flat.reshape(-1, 3).T)
        if flat.size and (columns[1].min() < 0 or columns[1].max() >= num_blocks):
            raise ValueError(f"source blocks {columns[1].min()}..{columns[1].max()} in a pool of {num_blocks}")
        if flat.size and (flat.min() < 0 or flat.max() >= 1 << 32):
            raise ValueError("block indices and slots are between 0 and 2**32 - 1")
        return Copies(columns[0], columns[1], columns[2])

    def __len__(self) -> int:
        return int(self.indices.size)

    @property
    def num_runs(self) -> int:
        """The number of runs of blocks that are neighbours on both sides."""
        is_next = (np.diff(self.sources) == 1) & (np.diff(self.slots) == 1)
        return len(self) - int(np.count_nonzero(is_next))

    def take(self, rows: slice | Indices) -> Copies:
        """The copies in these rows."""
        return Copies(self.indices[rows], self.sources[rows], self.slots[rows])


@dataclass(slots=True, eq=False)
class Piece:
    """The content of one message: blocks of one reservation, in the order of the data frame."""

    reservation: str
    copies: Copies
    direct: bool
    """Whether the blocks are neighbours in the pool, so that the frame can be a view of it."""
    staging: Bytes | None = None
    """The buffer the blocks were gathered into, [num_blocks, block_bytes]; None before, and for direct pieces."""
    part: PartCopy | None = None
    """The part of each block that is sent; None: all of it."""

    def bytes_per_block(self, block_bytes: int) -> int:
        """The bytes that are sent of each block."""
        return block_bytes if self.part is None else self.part.source.size


def frame_blocks(block_bytes: int, sizes: FrameSizes) -> int:
    """Returns the largest number of blocks in a frame."""
    return max(1, sizes.frame_bytes // block_bytes)


def cut(
    reservation: str,
    copies: Copies,
    block_bytes: int,
    sizes: FrameSizes,
    *,
    in_place: bool = True,
    part: PartCopy | None = None,
) -> Iterator[Piece]:
    """All blocks of `copies`, each in one piece; every piece holds at least one block and at most a frame if it can.

    Without `in_place` no piece is direct, nor is one of a `part` that is not the sender's whole block.
    """
    step = frame_blocks(block_bytes, sizes)
    if part is not None:
        step *= block_bytes // part.source.size  # buffers for whole blocks hold this many
        in_place = in_place and part.source.is_whole
    ordered = copies.take(np.argsort(copies.sources, kind="stable"))
    starts = np.flatnonzero(np.diff(ordered.sources, prepend=ordered.sources[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ordered))
    is_direct = (lengths * block_bytes >= sizes.direct_bytes) | (lengths == len(ordered))
    is_direct &= in_place
    for start, length in zip(starts[is_direct].tolist(), lengths[is_direct].tolist(), strict=True):
        for first in range(start, start + length, step):
            last = min(first + step, start + length)
            yield Piece(reservation, ordered.take(slice(first, last)), direct=True, part=part)
    scattered = np.flatnonzero(~np.repeat(is_direct, lengths))
    for first in range(0, scattered.size, step):
        yield Piece(reservation, ordered.take(scattered[first : first + step]), direct=False, part=part)
