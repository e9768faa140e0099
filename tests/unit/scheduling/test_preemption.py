"""The choice between computing again and copying, as a function of what either takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.scheduling.memory.swapping import Estimate, Preempted, estimate, prefers_swap
from kvrelay.scheduling.step_cost import StepCost

pytestmark = pytest.mark.unit
SIZE = 16
COST = StepCost(fixed_s=1.0, token_s=1e-4, pair_s=1e-8)
lengths = st.integers(1, 5000)
shares = st.floats(0, 1)


@given(lengths, lengths, shares)
def test_what_is_lost_is_between_the_open_tail_and_all_that_is_not_shared(
    num_computed: int, num_shared: int, lost_share: float
) -> None:
    num_shared = min(num_shared, num_computed) // SIZE * SIZE
    lost = Preempted(num_computed, num_shared, 0).num_lost(lost_share, SIZE)
    assert num_computed % SIZE <= lost <= num_computed - num_shared
    assert (num_computed - lost) % SIZE == 0  # whole blocks survive
    assert Preempted(num_computed, num_shared, 0).num_lost(1.0, SIZE) == num_computed - num_shared
    assert Preempted(num_computed, num_shared, 0).num_lost(0.0, SIZE) == num_computed % SIZE


@given(lengths, st.integers(0, 400), shares, st.floats(1e-9, 1e-2))
def test_each_way_is_paid_for_what_it_does(num_computed: int, num_new: int, lost_share: float, block_s: float) -> None:
    times = estimate(Preempted(num_computed, 0, num_new), COST, block_s, lost_share, SIZE)
    assert times.out_s == block_s * num_new
    lost = Preempted(num_computed, 0, 0).num_lost(lost_share, SIZE)
    # Summed token by token: each pays for itself and for what it attends to.
    by_token = sum(COST.token_s + COST.pair_s * (at + 0.5) for at in range(num_computed - lost, num_computed))
    assert times.recompute_s == pytest.approx(by_token)
    assert times.back_s == pytest.approx(block_s * -(-lost // SIZE))


def test_a_copy_is_made_where_it_saves_more_than_the_copies_that_yield_to_it() -> None:
    gains = Estimate(recompute_s=5.0, out_s=1.0, back_s=1.0)
    assert prefers_swap("auto", gains, 2.9)
    assert not prefers_swap("auto", gains, 3.0)
    assert prefers_swap("swap", gains, 99.0)
    assert not prefers_swap("recompute", gains, 0.0)
    assert not prefers_swap("auto", Estimate(1.0, 1.0, 1.0), 0.0)


def test_later_tokens_cost_more_than_the_first_ones() -> None:
    early = estimate(Preempted(512, 0, 1), COST, 0.0, 1.0, SIZE)
    late = estimate(Preempted(4096, 4096 - 512, 1), COST, 0.0, 1.0, SIZE)
    assert late.recompute_s > early.recompute_s
