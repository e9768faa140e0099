"""The cost model follows the machine, and chunks of equal time and preemptions follow the model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.scheduling.memory.swapping import Estimate, Preempted, estimate, prefers_swap
from kvrelay.scheduling.step_cost import CalibratedCost, CostSample, StepCost, fit, pairs


@given(st.floats(1e-9, 1e-2), st.floats(0, 1e-6), st.integers(0, 1_000_000), st.floats(0, 2, exclude_min=True))
def test_a_chunk_is_the_longest_that_the_time_allows(
    token_s: float, pair_s: float, position: int, seconds: float
) -> None:
    cost = StepCost(0.0, token_s, pair_s)
    num_tokens = cost.tokens_within(seconds, position)
    assert cost.step_s(num_tokens, pairs(position, num_tokens)) <= seconds * 1.001 + 1e-6 * token_s
    assert cost.step_s(num_tokens + 1, pairs(position, num_tokens + 1)) >= seconds * 0.999


def test_no_time_allows_no_token() -> None:
    assert StepCost().tokens_within(-1.0, 10) == StepCost().tokens_within(0.0, 0) == 0


@pytest.mark.parametrize(
    "true", [StepCost(2e-3, 1e-5, 1e-9), StepCost(0.02, 4e-4, 2e-7), StepCost(1e-4, 1e-6, 0.0)], ids=repr
)
def test_the_model_follows_measured_steps_whatever_it_was_given(true: StepCost) -> None:
    rng = random.Random(1)
    cost = CalibratedCost()
    for _ in range(400):
        num_tokens, position = rng.randint(1, 512), rng.randint(0, 8000)
        num_pairs = pairs(position, num_tokens)
        cost.observe(num_tokens, num_pairs, true.step_s(num_tokens, num_pairs) * rng.uniform(0.9, 1.1))
    for num_tokens, position in ((512, 0), (512, 7000), (64, 4000)):
        num_pairs = pairs(position, num_tokens)
        assert cost.current.step_s(num_tokens, num_pairs) == pytest.approx(true.step_s(num_tokens, num_pairs), rel=0.15)


def test_coefficients_that_the_steps_do_not_tell_keep_the_given_proportion() -> None:
    given_cost = StepCost(1e-3, 1e-4, 1e-8)
    cost = CalibratedCost(given_cost)
    for _ in range(50):
        cost.observe(
            100, pairs(0, 100), 10 * given_cost.step_s(100, pairs(0, 100))
        )  # always the same, ten times slower
    assert cost.current.step_s(100, pairs(0, 100)) == pytest.approx(0.11, rel=0.02)
    assert cost.current.pair_s / cost.current.token_s == pytest.approx(1e-4, rel=0.2)


def test_coefficients_are_never_negative_and_steps_without_a_time_teach_nothing() -> None:
    cost = CalibratedCost()
    for num_tokens in range(1, 200):
        cost.observe(num_tokens, pairs(0, num_tokens), 1.0 / num_tokens)  # the longer, the faster: no machine does that
    assert min(cost.current.fixed_s, cost.current.token_s, cost.current.pair_s) >= 0
    before = cost.current
    for _ in range(50):
        cost.observe(100, 5000.0, 0.0)
    assert cost.current == before


@pytest.mark.parametrize("true", [StepCost(2e-3, 1e-5, 1e-9), StepCost(0.02, 4e-4, 2e-7)], ids=repr)
def test_a_fit_of_a_few_clean_samples_predicts_the_others(true: StepCost) -> None:
    loads = [(tokens, pairs(position, tokens)) for tokens in (1, 128, 512) for position in (0, 1024, 2048)]
    cost = fit([CostSample(*load, true.step_s(*load)) for load in loads])
    for tokens, position in ((64, 100), (300, 1500), (512, 2000)):
        load = tokens, pairs(position, tokens)
        assert cost.step_s(*load) == pytest.approx(true.step_s(*load), rel=0.1)


def test_no_samples_leave_what_was_given() -> None:
    assert fit([], StepCost(1.0, 2.0, 3.0)) == StepCost(1.0, 2.0, 3.0)


# -- the choice between computing again and copying, as a function of what either takes ------------------------------


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
