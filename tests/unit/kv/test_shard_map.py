"""Which rank sends which heads to which, for all small sizes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvrelay.kv.shard_map import ShardShape, map_heads, why_not_between

EVEN = [shape for shape in (ShardShape(*each) for each in product(range(1, 17), range(1, 17))) if shape.is_even]
PAIRS = [(source, target) for source, target in product(EVEN, EVEN) if source.num_kv_heads == target.num_kv_heads]


def heads_of(shape: ShardShape, rank: int) -> range:
    """Written out: whole groups of heads for each rank, or one head for a group of ranks."""
    if shape.num_kv_heads >= shape.size:
        each = shape.num_kv_heads // shape.size
        return range(rank * each, (rank + 1) * each)
    return range(rank // (shape.size // shape.num_kv_heads), rank // (shape.size // shape.num_kv_heads) + 1)


def test_each_head_of_each_target_rank_comes_once_and_is_the_right_one() -> None:
    for source, target in PAIRS:
        check_heads(source, target)


def check_heads(source: ShardShape, target: ShardShape) -> None:
    came: list[tuple[int, int]] = []
    for copy in map_heads(source, target):
        sent = heads_of(source, copy.source_rank)[copy.source_head : copy.source_head + copy.num_heads]
        got = heads_of(target, copy.target_rank)[copy.target_head : copy.target_head + copy.num_heads]
        assert list(sent) == list(got)
        assert len(sent) == copy.num_heads
        came += [(copy.target_rank, copy.target_head + i) for i in range(copy.num_heads)]
    assert sorted(came) == [(rank, head) for rank in range(target.size) for head in range(target.heads_per_rank)]


def test_equal_workers_send_from_each_rank_to_the_same_rank() -> None:
    for shape in EVEN:
        copies = map_heads(shape, shape)
        assert [tuple(copy) for copy in copies] == [(r, 0, r, 0, shape.heads_per_rank) for r in range(shape.size)]


def test_ranks_that_hold_the_same_heads_share_the_work() -> None:
    for source, target in PAIRS:
        if source.num_kv_heads >= source.size:
            continue
        sent = Counter(copy.source_rank for copy in map_heads(source, target))
        loads = [sent[rank] for rank in range(source.size)]
        assert max(loads) <= -(-target.size * target.heads_per_rank // source.size)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (ShardShape(2, 4), ShardShape(2, 8), "4 KV heads there, 8 here"),
        (ShardShape(3, 4), ShardShape(2, 4), "4 KV heads do not divide among 3 ranks"),
        (ShardShape(2, 4), ShardShape(6, 4), "4 KV heads do not divide among 6 ranks"),
        (ShardShape(1, 0), ShardShape(2, 0), "0 KV heads do not divide among 1 ranks"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(source: ShardShape, target: ShardShape, reason: str) -> None:
    assert why_not_between(source, target) == reason
    with pytest.raises(ValueError, match=reason):
        map_heads(source, target)
