"""A sequence's block table, and copy-on-write of a shared block (Kwon et al., SOSP 2023, sections 4.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.pool import BlockPool, BlockState

_MIN_CAPACITY = 8


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens; the last may be part full."""
    return -(-num_tokens // block_size)


def blocks_for_group(num_shared: int, longest: int, width: int, block_size: int) -> int:
    """Blocks that `width` sequences of up to `longest` tokens take at most, if they share the first `num_shared`."""
    num_full = num_shared // block_size
    return num_full + width * (blocks_for(longest, block_size) - num_full)


class BlockTable:
    """A sequence's blocks in order. The scheduler takes and drops the holds on them.

    A view taken from `ids` never changes: appending writes behind it, everything else copies. So views may sit in a
    batch that is being computed.
    """

    def __init__(self, block_size: int, blocks: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        """Number of blocks. Read-only, like `capacity_tokens`; no properties, because both are read very often."""
        self.capacity_tokens = 0
        """Number of tokens that the blocks can hold."""
        self._storage = np.empty(0, np.int32)
        self._view: NDArray[np.int32] | None = None
        self.append(blocks)

    @property
    def ids(self) -> NDArray[np.int32]:
        """The block ids, `[num_blocks]`: a read-only view, not a copy."""
        if self._view is None:
            self._view = self._storage[: self.num_blocks]
            self._view.flags.writeable = False
        return self._view

    @property
    def last(self) -> int:
        """The last block. Raises IndexError for an empty table."""
        if not self.num_blocks:
            raise IndexError("an empty table has no last block")
        return int(self._storage[self.num_blocks - 1])

    def append(self, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        """Adds blocks at the end. Amortised O(1) a block."""
        needed = self.num_blocks + len(blocks)
        if needed > len(self._storage):
            self._copy_storage(max(needed, 2 * self.num_blocks, _MIN_CAPACITY))
        if len(blocks) == 1:  # the usual case, and a slice assignment costs ten times as much
            self._storage[needed - 1] = blocks[0]
        else:
            self._storage[self.num_blocks : needed] = blocks
        self._resize(needed)

    def replace(self, index: int, block: int) -> None:
        """Puts another block in the place of the one at `index`. O(num_blocks). Raises IndexError."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"no block {index} in a table of {self.num_blocks}")
        self._copy_storage(len(self._storage))
        self._storage[index] = block
        self._view = None

    def truncate(self, num_blocks: int) -> list[int]:
        """Keeps the first `num_blocks` and returns the rest, which the caller releases."""
        if not 0 <= num_blocks <= self.num_blocks:
            raise IndexError(f"cannot keep {num_blocks} blocks of a table of {self.num_blocks}")
        dropped: list[int] = self._storage[num_blocks : self.num_blocks].tolist()
        self._resize(num_blocks)
        self._copy_storage(num_blocks)
        return dropped

    def clear(self) -> list[int]:
        """Empties the table and returns what it held."""
        return self.truncate(0)

    def _resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.capacity_tokens = num_blocks * self.block_size
        self._view = None

    def _copy_storage(self, capacity: int) -> None:
        storage = np.empty(capacity, np.int32)
        storage[: self.num_blocks] = self._storage[: self.num_blocks]
        self._storage = storage


@dataclass(frozen=True, slots=True)
class CopyInstruction:
    """Copy the K/V of block `source` into `target` before the sequence writes. Both are held as `state` until then."""

    source: int
    target: int
    state: BlockState


def copy_on_write(
    pool: BlockPool, table: BlockTable, index: int, state: BlockState = BlockState.RUNNING
) -> CopyInstruction | None:
    """Replaces the block at `index`, which is about to be written, by a private one. Returns the copy to make, or None
    if the block is private already.

    The sequence holds the source until `finish_copy`. Otherwise the other holders could release it, and another
    sequence could overwrite it before the copy is made. Raises OutOfBlocks.
    """
    source = int(table.ids[index])
    if not pool.is_shared(source):
        return None
    (target,) = pool.allocate(1, state)
    table.replace(index, target)
    return CopyInstruction(source, target, state)


def finish_copy(pool: BlockPool, copy: CopyInstruction) -> None:
    """Releases the source block. To be called after the copy has run."""
    pool.release([copy.source], copy.state)
