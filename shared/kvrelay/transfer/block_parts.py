"""Parts of blocks: the KV of some heads. Pure arithmetic.

A block is `[layer, 2, kv_head, token, dim]`, so a range of heads is a run of bytes in each of its rows, one row for a
layer's keys and one for its values. All rows have the same length, and the runs lie at the same place in each.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.kv.shard_map import HeadCopy, ShardShape, map_heads


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Of each of a block's `num_rows` rows of `row_bytes`, `num_bytes` from `first_byte` on.

    Raises ValueError for bytes outside a row.
    """

    num_rows: int
    row_bytes: int
    first_byte: int
    num_bytes: int

    def __post_init__(self) -> None:
        is_inside = self.first_byte >= 0 and 0 < self.num_bytes <= self.row_bytes - self.first_byte
        if self.num_rows < 1 or not is_inside:
            raise ValueError(f"no part of a block: {self}")

    @property
    def size(self) -> int:
        """The bytes of the part."""
        return self.num_rows * self.num_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of the whole block."""
        return self.num_rows * self.row_bytes

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self.row_bytes


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part of the sender's blocks that becomes a part of the receiver's. `number`: of the parts admitted there."""

    number: int
    source: BlockPart
    target: BlockPart

    def __post_init__(self) -> None:
        if (self.source.num_rows, self.source.num_bytes) != (self.target.num_rows, self.target.num_bytes):
            raise ValueError(f"{self.source} has not the shape of {self.target}")


@dataclass(frozen=True, slots=True)
class RankCopy:
    """A part that one rank sends to another."""

    source_rank: int
    target_rank: int
    part: PartCopy


def rank_copies(source: ShardShape, target: ShardShape, num_rows: int, head_bytes: int) -> tuple[RankCopy, ...]:
    """The parts that ranks of one worker send to ranks of another. `head_bytes`: of one head's tokens in a row.

    A target rank's parts are numbered from 0 and cover its blocks without overlap. Raises ValueError if the shapes do
    not go together.
    """
    copies: list[RankCopy] = []
    numbers = [0] * target.size
    for copy in map_heads(source, target):
        parts = (
            _part(source, copy.source_head, copy, num_rows, head_bytes),
            _part(target, copy.target_head, copy, num_rows, head_bytes),
        )
        copies.append(RankCopy(copy.source_rank, copy.target_rank, PartCopy(numbers[copy.target_rank], *parts)))
        numbers[copy.target_rank] += 1
    return tuple(copies)


def _part(shape: ShardShape, first_head: int, copy: HeadCopy, num_rows: int, head_bytes: int) -> BlockPart:
    row_bytes = shape.heads_per_rank * head_bytes
    return BlockPart(num_rows, row_bytes, first_head * head_bytes, copy.num_heads * head_bytes)
