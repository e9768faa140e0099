"""Permits to write blocks into slots, held by the receiver. Pure, and not thread-safe.

A slot has a permit from `admit` until its block has landed or the reservation is released. A block that has landed is
not written again, so a repeated push cannot change a slot that decode already reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvrelay.handoff.transports.block_parts import BlockPart
from kvrelay.handoff.transports.wire import BlocksHeader, Indices

DropCause = Literal[
    "malformed",
    "unknown_reservation",
    "block_bytes",
    "part",
    "size",
    "index",
    "slot",
    "repeated_index",
    "duplicate",
    "checksum",
]


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since start; `num_blocks` and `num_bytes` are those written, without what was dropped."""

    num_messages: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    dropped: Counter[DropCause] = field(default_factory=Counter)
    """Messages by cause."""
    num_duplicate_blocks: int = 0
    """Blocks of accepted messages that had landed before, and were skipped."""


class Dropped(Exception):
    """The message must not be written. `cause` is for the counters."""

    def __init__(self, cause: DropCause) -> None:
        super().__init__(cause)
        self.cause: DropCause = cause


@dataclass(slots=True, eq=False)
class _Admitted:
    first_block: int
    slots: Indices
    parts: tuple[BlockPart | None, ...]  # that make up each block; None: the whole block
    landed: NDArray[np.bool_]  # [parts, blocks]

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """[blocks]: whether all parts of a block have landed."""
        whole: NDArray[np.bool_] = np.logical_and.reduce(self.landed, axis=0)
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """Rows of a data frame and the slots they go to, int64 of equal shape [num_blocks]; blocks by prompt index."""

    rows: Indices
    slots: Indices
    blocks: tuple[int, ...]
    part: BlockPart | None = None  # the part of each slot that is written; None: all of it

    def take(self, which: NDArray[np.bool_]) -> Writes:
        """Those for which `which`, of shape [num_blocks], holds."""
        if which.all():
            return self
        chosen = np.flatnonzero(which)
        return Writes(self.rows[chosen], self.slots[chosen], tuple(self.blocks[i] for i in chosen.tolist()), self.part)


class WritePermits:
    """Slots of one pool of `num_blocks` blocks of `block_bytes` bytes."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._admitted: dict[str, _Admitted] = {}
        self._permitted = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._admitted)

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._admitted

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        """Without `parts` blocks come whole, otherwise in these parts, which may not overlap.

        Raises ValueError, changing nothing, for a reservation or slot in use, for a slot outside the pool and for parts
        of other blocks.
        """
        wanted = np.array(slots, np.int64)
        if reservation in self._admitted:
            raise ValueError(f"reservation {reservation} is admitted already")
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self._num_blocks):
            raise ValueError(f"slots {wanted.min()}..{wanted.max()} in a pool of {self._num_blocks} blocks")
        if np.unique(wanted).size != wanted.size or self._permitted[wanted].any():
            raise ValueError(f"a slot of reservation {reservation} is named twice, or another reservation's")
        if any(part.block_bytes != self._block_bytes for part in parts):
            raise ValueError(f"parts of blocks that do not have {self._block_bytes} bytes: {list(parts)}")
        self._permitted[wanted] = True
        ways = tuple(parts) or (None,)
        self._admitted[reservation] = _Admitted(first_block, wanted, ways, np.zeros((len(ways), wanted.size), np.bool_))

    def release(self, reservation: str) -> None:
        """Forgets a reservation; an unknown one is no error."""
        admitted = self._admitted.pop(reservation, None)
        if admitted is not None:
            self._permitted[admitted.slots[~admitted.is_whole]] = False

    def check(self, header: BlocksHeader, data_bytes: int) -> Writes:
        """Returns the rows of this message that must be written. Changes nothing. Raises Dropped."""
        admitted = self._admitted.get(header.reservation)
        if admitted is None:
            raise Dropped("unknown_reservation")
        if not 0 <= header.part < len(admitted.parts):
            raise Dropped("part")
        part = admitted.parts[header.part]
        if header.block_bytes != (self._block_bytes if part is None else part.size):
            raise Dropped("block_bytes")
        if data_bytes != header.indices.size * header.block_bytes:
            raise Dropped("size")
        offsets = header.indices - admitted.first_block
        if offsets.min() < 0 or offsets.max() >= admitted.slots.size:
            raise Dropped("index")
        if np.unique(offsets).size != offsets.size:
            raise Dropped("repeated_index")
        slots = admitted.slots[offsets]
        if not np.array_equal(slots, header.slots):
            raise Dropped("slot")
        rows = np.flatnonzero(~admitted.landed[header.part, offsets])
        if not rows.size:
            raise Dropped("duplicate")
        return Writes(rows, slots[rows], tuple(header.indices[rows].tolist()), part)

    def land(self, reservation: str, blocks: Sequence[int], part: int = 0) -> tuple[int, ...]:
        """This part of blocks that `check` returned has been written into their slots.

        Returns the blocks of which all parts have landed now.
        """
        admitted = self._admitted[reservation]
        offsets = np.array(blocks, np.int64) - admitted.first_block
        admitted.landed[part, offsets] = True
        if len(admitted.parts) > 1:
            offsets = offsets[admitted.is_whole[offsets]]
        self._permitted[admitted.slots[offsets]] = False
        return tuple((offsets + admitted.first_block).tolist())
