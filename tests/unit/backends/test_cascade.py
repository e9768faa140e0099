"""Which rows read a shared prefix together: groups against a slow oracle, and what is laid out for them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends.backend import Int32Array
from kvrelay.backends.cascade import CascadeCosts, SharedPrefix, find_groups, plan_cascade, saved_tokens
from tests.thoroughness import examples

pytestmark = pytest.mark.unit
BLOCK_SIZE = 8
FREE = CascadeCosts(row_tokens=0, step_tokens=0)

Tables = list[list[int]]


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 9) -> Tables:
    """Full blocks of each row: random walks down a random tree; a block's id names the path to it."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        path = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=6))
        rows.append([ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))])
    return rows


def decode_rows(full: Tables) -> tuple[Int32Array, Int32Array]:
    """Tables and lengths of rows that write a token behind their full blocks, into blocks of their own."""
    longest = max(map(len, full)) + 1
    packed = np.zeros((len(full), longest), np.int32)
    for row, blocks in enumerate(full):
        packed[row, : len(blocks) + 1] = [*blocks, 1000 + row]
    positions = [len(blocks) * BLOCK_SIZE + row % BLOCK_SIZE for row, blocks in enumerate(full)]
    return packed, np.array(positions, np.int32) + 1


def total(groups: list[SharedPrefix], costs: CascadeCosts) -> int:
    return sum(saved_tokens(len(group.rows), group.num_blocks, BLOCK_SIZE, costs) for group in groups)


def common_blocks(full: Tables, rows: tuple[int, ...]) -> int:
    columns = zip(*(full[row] for row in rows), strict=False)
    return next(
        (depth for depth, column in enumerate(columns) if len(set(column)) > 1), min(len(full[r]) for r in rows)
    )


def slow_oracle(full: Tables, prefix: tuple[int, ...], costs: CascadeCosts) -> tuple[int, set[int]]:
    """By the rule's words, from the root down: what the rows under `prefix` save, and which of them no group took."""
    under = [row for row, blocks in enumerate(full) if tuple(blocks[: len(prefix)]) == prefix]
    if len(under) == 1:
        return 0, set(under)
    nexts = {full[row][len(prefix)] for row in under if len(full[row]) > len(prefix)}
    children = [slow_oracle(full, (*prefix, block), costs) for block in sorted(nexts)]
    saved = sum(child_saved for child_saved, _ in children)
    ended = {row for row in under if len(full[row]) == len(prefix)}
    free = ended.union(*(child_free for _, child_free in children))
    together = saved_tokens(len(under), len(prefix), BLOCK_SIZE, costs)
    left = saved_tokens(len(free), len(prefix), BLOCK_SIZE, costs) if len(free) > 1 else 0
    if len(nexts) + len(ended) == 1:  # nobody parts here
        return saved, free
    if not prefix:
        return saved, free
    if together > max(0, saved + max(0, left)):
        return together, set()
    return (saved + left, set()) if left > 0 else (saved, free)


costs_of_rows = st.builds(CascadeCosts, row_tokens=st.integers(0, 20), step_tokens=st.just(0))


@given(tables(), costs_of_rows)
def test_groups_share_what_they_say_and_are_those_of_the_slow_oracle(full: Tables, costs: CascadeCosts) -> None:
    groups = find_groups(*decode_rows(full), BLOCK_SIZE, costs)
    taken = [row for group in groups for row in group.rows]
    assert len(taken) == len(set(taken))
    for group in groups:
        assert len(group.rows) > 1
        assert list(group.rows) == sorted(group.rows)
        assert 1 <= group.num_blocks == common_blocks(full, group.rows)
        assert saved_tokens(len(group.rows), group.num_blocks, BLOCK_SIZE, costs) > 0
    saved, free = slow_oracle(full, (), costs)
    assert total(groups, costs) == saved
    assert set(range(len(full))) - set(taken) == free


@settings(max_examples=examples(60))
@given(tables(max_rows=6), costs_of_rows)
def test_no_one_group_of_any_rows_saves_more(full: Tables, costs: CascadeCosts) -> None:
    saved = total(find_groups(*decode_rows(full), BLOCK_SIZE, costs), costs)
    for size in range(2, len(full) + 1):
        for rows in combinations(range(len(full)), size):
            assert saved >= saved_tokens(size, common_blocks(full, rows), BLOCK_SIZE, costs)


@given(tables(), costs_of_rows)
def test_places_hold_every_page_of_every_row_once(full: Tables, costs: CascadeCosts) -> None:
    packed, num_keys = decode_rows(full)
    groups = find_groups(packed, num_keys, BLOCK_SIZE, costs)
    plan = plan_cascade(packed, num_keys, BLOCK_SIZE, costs)
    assert (plan is None) == (not groups)
    if plan is None:
        return
    assert sorted(plan.order.tolist()) == list(range(len(full)))
    assert plan.keeps_order == (plan.order.tolist() == list(range(len(full))))
    assert plan.prefixes.num_rows == len(groups)
    prefixes: list[list[int]] = [[]] * len(full)
    for index in range(len(groups)):
        pages = plan.prefixes.page_ids[plan.prefixes.page_starts[index] : plan.prefixes.page_starts[index + 1]]
        for place in range(plan.prefixes.query_starts[index], plan.prefixes.query_starts[index + 1]):
            prefixes[place] = pages.tolist()
    assert plan.num_shared == sum(map(bool, prefixes))
    assert set(plan.prefixes.last_page_lens.tolist()) == {BLOCK_SIZE}
    for place, row in enumerate(plan.order.tolist()):
        suffix = plan.suffixes.page_ids[plan.suffixes.page_starts[place] : plan.suffixes.page_starts[place + 1]]
        assert prefixes[place] + suffix.tolist() == [*full[row], 1000 + row]
        assert len(full[row]) * BLOCK_SIZE + plan.suffixes.last_page_lens[place] == num_keys[row]


def test_a_step_that_saves_less_than_it_costs_is_left_as_it_is() -> None:
    full = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5]]
    saved = 2 * 2 * BLOCK_SIZE
    assert plan_cascade(*decode_rows(full), BLOCK_SIZE, CascadeCosts(0, saved)) is not None
    assert plan_cascade(*decode_rows(full), BLOCK_SIZE, CascadeCosts(0, saved + 1)) is None
    assert plan_cascade(*decode_rows([[0, 1]]), BLOCK_SIZE, FREE) is None
    assert plan_cascade(*decode_rows([[], []]), BLOCK_SIZE, FREE) is None


def test_the_block_that_a_row_writes_into_is_never_shared() -> None:
    """Rows whose tables are the same to the end: as samples of one prompt before the first of them writes."""
    table = np.array([[4, 5, 6], [4, 5, 6]], np.int32)
    num_keys = np.full(2, 2 * BLOCK_SIZE + 1, np.int32)
    assert find_groups(table, num_keys, BLOCK_SIZE, FREE) == [SharedPrefix((0, 1), 2)]


def test_many_rows_that_part_one_by_one_are_grouped_without_recursion() -> None:
    full = [[*range(row), 10_000 + row] for row in range(1, 1500)]
    groups = find_groups(*decode_rows(full), BLOCK_SIZE, FREE)
    assert total(groups, FREE) >= max((1500 - row - 1) * row for row in range(1, 1500)) * BLOCK_SIZE
    assert all(group.num_blocks == common_blocks(full, group.rows) for group in groups)


def test_costs_are_told_in_tokens_of_a_layer() -> None:
    # 8 KV heads of 128 in 16 bits: 4096 bytes a token; an output of 32 heads has 8192, and moves four times.
    assert CascadeCosts.of(group=4, token_bytes=4096) == CascadeCosts(4 * 8192 // 4096, 1 << 13, 1 << 17)
