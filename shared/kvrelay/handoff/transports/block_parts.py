"""Parts of blocks: the KV of some layers and heads. Pure arithmetic.

A block is `[layer, 2, kv_head, token, dim]`, so it has two rows for each layer, its keys and its values. A range of
layers is a range of rows, and a range of heads is a run of bytes in each row. All rows have the same length, and the
runs lie at the same place in each.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.kv.shard_map import HeadCopy, LayerCopy, ShardShape, layers_of_stage, map_heads, map_layers


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


@dataclass(frozen=True, slots=True)
class RankCopy:
    """A part that one rank sends to another."""

    source_rank: int
    target_rank: int
    part: PartCopy


def rank_copies(source: ShardShape, target: ShardShape, num_layers: int, head_bytes: int) -> tuple[RankCopy, ...]:
    """The parts that ranks of one worker send to ranks of another. `num_layers`: of the whole model; `head_bytes`: of
    one head's tokens in a row.

    A target rank's parts are numbered from 0 and cover its blocks without overlap. Raises ValueError if the shapes do
    not go together.
    """
    copies: list[RankCopy] = []
    numbers = [0] * target.num_ranks
    heads = map_heads(source, target)
    for layer in map_layers(source, target, num_layers):
        for head in heads:
            source_rank = source.rank_in(layer.source_stage, head.source_rank)
            target_rank = target.rank_in(layer.target_stage, head.target_rank)
            parts = (
                _part(
                    source, source_rank, (layer.source_layer, head.source_head), (layer, head), num_layers, head_bytes
                ),
                _part(
                    target, target_rank, (layer.target_layer, head.target_head), (layer, head), num_layers, head_bytes
                ),
            )
            copies.append(RankCopy(source_rank, target_rank, PartCopy(numbers[target_rank], *parts)))
            numbers[target_rank] += 1
    return tuple(copies)


def _part(
    shape: ShardShape,
    rank: int,
    first: tuple[int, int],
    copies: tuple[LayerCopy, HeadCopy],
    num_layers: int,
    head_bytes: int,
) -> BlockPart:
    """The part of a rank's blocks that begins with the layer and the head `first`."""
    (first_layer, first_head), (layer, head) = first, copies
    return BlockPart(
        block_rows=2 * len(layers_of_stage(num_layers, shape.stage_of(rank), shape.num_stages)),
        row_bytes=shape.heads_per_rank * head_bytes,
        first_row=2 * first_layer,
        num_rows=2 * layer.num_layers,
        first_byte=first_head * head_bytes,
        num_bytes=head.num_heads * head_bytes,
    )
