"""Which layers and KV heads each rank of a worker holds, and which rank of another worker gets them. Pure.

With tensor parallelism each rank holds the KV of some heads of all blocks. If there are more ranks than KV heads,
neighbouring ranks hold the same head. With pipeline parallelism each stage, of one or several ranks, holds the KV of
some layers. Two workers of one model may have different numbers of stages, and of ranks in a stage.
"""

from __future__ import annotations

from typing import NamedTuple


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a stage. If they do not divide, the first stages have one more, since the last one has the head."""
    length, rest = divmod(num_layers, num_stages)
    start = stage * length + min(stage, rest)
    return range(start, start + length + (stage < rest))


class ShardShape(NamedTuple):
    """How a worker divides a model's KV: its layers among `num_stages`, and `num_kv_heads` heads of the whole model
    among the `size` ranks of each stage.

    Rank 0 samples, so the first ranks are those of the last stage; the others follow from the first stage on. Heads are
    divided by a rank's number within its stage.
    """

    size: int
    num_kv_heads: int
    num_stages: int = 1

    @property
    def num_ranks(self) -> int:
        """The ranks of all stages."""
        return self.size * self.num_stages

    def stage_of(self, rank: int) -> int:
        """The stage of a rank, from 0 on."""
        return (rank // self.size - 1) % self.num_stages

    def rank_in(self, stage: int, number: int) -> int:
        """The rank with a number within its stage."""
        return (stage + 1) % self.num_stages * self.size + number

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.size)

    def first_head(self, number: int) -> int:
        """The first of the model's KV heads that a rank holds, by its number within its stage."""
        return number * self.num_kv_heads // self.size

    @property
    def is_even(self) -> bool:
        """Returns whether the heads divide by the ranks, or the ranks by the heads."""
        return self.size > 0 < self.num_kv_heads and (
            self.num_kv_heads % self.size == 0 or self.size % self.num_kv_heads == 0
        )


class LayerCopy(NamedTuple):
    """A range of layers that one stage sends to another. Layers are counted within each stage."""

    source_stage: int
    source_layer: int
    target_stage: int
    target_layer: int
    num_layers: int


class HeadCopy(NamedTuple):
    """A range of heads that one rank of a stage sends to one of another. Heads are counted within each rank."""

    source_rank: int
    source_head: int
    target_rank: int
    target_head: int
    num_heads: int


def why_not_between(source: ShardShape, target: ShardShape) -> str:
    """Why KV cannot go from one worker to the other. Empty if it can."""
    if source.num_kv_heads != target.num_kv_heads:
        return f"{source.num_kv_heads} KV heads there, {target.num_kv_heads} here"
    for shape in (source, target):
        if not shape.is_even:
            return f"{shape.num_kv_heads} KV heads do not divide among {shape.size} ranks"
        if shape.num_stages < 1:
            return f"{shape.num_stages} stages"
    return ""


def map_layers(source: ShardShape, target: ShardShape, num_layers: int) -> tuple[LayerCopy, ...]:
    """The copies that bring each of a model's layers once, in the order of layers. They are cut wherever a stage of
    either worker ends.

    Raises:
        ValueError: a worker has more stages than the model has layers.
    """
    if (most := max(source.num_stages, target.num_stages)) > num_layers:
        raise ValueError(f"{num_layers} layers do not divide among {most} stages")
    copies: list[LayerCopy] = []
    for source_stage in range(source.num_stages):
        own = layers_of_stage(num_layers, source_stage, source.num_stages)
        for target_stage in range(target.num_stages):
            theirs = layers_of_stage(num_layers, target_stage, target.num_stages)
            first, last = max(own.start, theirs.start), min(own.stop, theirs.stop)
            if first < last:
                copies.append(
                    LayerCopy(source_stage, first - own.start, target_stage, first - theirs.start, last - first)
                )
    return tuple(copies)


def map_heads(source: ShardShape, target: ShardShape) -> tuple[HeadCopy, ...]:
    """The copies between two stages that bring each head of each target rank once, ordered by target rank and head.
    Ranks are counted within their stages.

    If several source ranks hold a head, the target ranks that need it are spread over them in order.

    Raises:
        ValueError: `why_not_between` has the reason.
    """
    if reason := why_not_between(source, target):
        raise ValueError(reason)
    copies: list[HeadCopy] = []
    for rank in range(target.size):
        for local in range(target.heads_per_rank):
            head = target.first_head(rank) + local
            holder, source_head = _holder_of(source, head, _replica_of(target, rank), _num_replicas(target))
            last = copies[-1] if copies else None
            if last is not None and _follows(last, holder, source_head, rank):
                copies[-1] = last._replace(num_heads=last.num_heads + 1)
            else:
                copies.append(HeadCopy(holder, source_head, rank, local, 1))
    return tuple(copies)


def _follows(last: HeadCopy, source_rank: int, source_head: int, target_rank: int) -> bool:
    """Returns whether a head lies behind those of the last copy on both sides."""
    is_same_pair = (last.source_rank, last.target_rank) == (source_rank, target_rank)
    return is_same_pair and last.source_head + last.num_heads == source_head


def _num_replicas(shape: ShardShape) -> int:
    return max(1, shape.size // shape.num_kv_heads)


def _replica_of(shape: ShardShape, rank: int) -> int:
    """The number of a rank among those that hold the same heads."""
    return rank % _num_replicas(shape)


def _holder_of(shape: ShardShape, head: int, wanted: int, num_wanting: int) -> tuple[int, int]:
    """A rank that holds a head, and the head's number there, for the replica `wanted` of `num_wanting`."""
    num_replicas = _num_replicas(shape)
    if num_replicas > 1:
        return head * num_replicas + wanted * num_replicas // num_wanting, 0
    return head // shape.heads_per_rank, head % shape.heads_per_rank
