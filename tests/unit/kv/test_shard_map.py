"""Which rank sends which heads to which, for all small sizes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvrelay.kv.shard_map import ShardShape, layers_of_stage, map_heads, map_layers, why_not_between

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


def test_each_layer_comes_once_to_the_stage_that_holds_it() -> None:
    for num_layers, source, target in product(range(1, 12), range(1, 12), range(1, 12)):
        shapes = ShardShape(1, 1, source), ShardShape(1, 1, target)
        if max(source, target) > num_layers:
            with pytest.raises(
                ValueError, match=f"{num_layers} layers do not divide among {max(source, target)} stages"
            ):
                map_layers(*shapes, num_layers)
            continue
        stages = [[layers_of_stage(num_layers, stage, count) for stage in range(count)] for count in (source, target)]
        copies, came = map_layers(*shapes, num_layers), list[int]()
        for copy in copies:
            sent = stages[0][copy.source_stage][copy.source_layer : copy.source_layer + copy.num_layers]
            assert sent == stages[1][copy.target_stage][copy.target_layer : copy.target_layer + copy.num_layers]
            came += sent
        assert came == list(range(num_layers))
        assert len(copies) < source + target, "cut only at the ends of stages"


def test_numbers_of_ranks_and_stages() -> None:
    for size, num_stages in product(range(1, 5), range(1, 5)):
        shape = ShardShape(size, 12, num_stages)
        assert shape.stage_of(0) == num_stages - 1, "rank 0 samples"
        found = [(shape.stage_of(rank), rank % size) for rank in range(shape.num_ranks)]
        assert sorted(found) == list(product(range(num_stages), range(size)))
        assert [shape.rank_in(*each) for each in found] == list(range(shape.num_ranks))


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
