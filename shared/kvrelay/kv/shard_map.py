"""Which KV heads each rank of a worker holds, and which rank of another worker gets them. Pure.

With tensor parallelism each rank holds the KV of some heads of all blocks. If there are more ranks than KV heads,
neighbouring ranks hold the same head. Two workers of one model may have different numbers of ranks.
"""

from __future__ import annotations

from typing import NamedTuple


class ShardShape(NamedTuple):
    """How a worker divides a model's KV heads: `num_kv_heads` of the whole model among `size` ranks."""

    size: int
    num_kv_heads: int

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.size)

    def first_head(self, rank: int) -> int:
        """The first of the model's KV heads that a rank holds."""
        return rank * self.num_kv_heads // self.size

    @property
    def is_even(self) -> bool:
        """Returns whether the heads divide by the ranks, or the ranks by the heads."""
        return self.size > 0 < self.num_kv_heads and (
            self.num_kv_heads % self.size == 0 or self.size % self.num_kv_heads == 0
        )


class HeadCopy(NamedTuple):
    """A range of heads that one rank sends to another. Heads are counted within each rank."""

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
    return ""


def map_heads(source: ShardShape, target: ShardShape) -> tuple[HeadCopy, ...]:
    """The copies that bring each head of each target rank once, ordered by target rank and head.

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
