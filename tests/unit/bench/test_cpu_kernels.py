"""The work by which benchmarks/cpu_kernels judges a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cpu_kernels_steps import StepCase, Work, attended_keys, read_keys

pytestmark = pytest.mark.unit

rows = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=4)


@given(rows, st.none() | st.integers(1, 25))
def test_keys_of_a_step_are_those_that_its_masks_leave(rows: list[tuple[int, int]], window: int | None) -> None:
    pairs, read = 0, 0
    for query_len, position in rows:
        seen = [
            {key for key in range(at + 1) if window is None or key > at - window}
            for at in range(position, position + query_len)
        ]
        pairs += sum(map(len, seen))
        read += len(set().union(*seen))
    case = StepCase("", [query_len for query_len, _ in rows], [position for _, position in rows])
    assert attended_keys(case, window) == pairs
    assert read_keys(case, window) == read


def test_the_floor_counts_products_and_attention_and_names_what_takes_it() -> None:
    work = Work(read_bytes=30 * 10**9, weight_flops=400 * 10**9, attention_flops=200 * 10**9)
    assert work.floor_s(read_gb_s=10, gflop_s=400) == (3.0, "read")
    assert work.floor_s(read_gb_s=60, gflop_s=400) == (1.5, "GEMM")
