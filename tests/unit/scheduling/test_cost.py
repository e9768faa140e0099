"""The cost model follows the machine, and chunks of equal time follow the model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.scheduling.step_cost import CalibratedCost, CostSample, StepCost, fit, pairs

pytestmark = pytest.mark.unit


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
