"""Beside a light tenant, prompts of others make no long steps: counted in tokens, so that no clock matters."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.scheduling.queue.fair_shares import RECENT_TURNS, RETURN_STEPS
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.thoroughness import examples
from tests.unit.scheduling.bench import Bench
from tests.unit.scheduling.overlapped import OverlappedBench

pytestmark = pytest.mark.unit
BUDGET, QUARTER = 64, 16
BenchT = TypeVar("BenchT", bound=Bench)


def bench_of(kind: type[BenchT]) -> BenchT:
    bench = kind(400, token_budget=BUDGET, max_running=8, cache=False, eos=99)
    shares = bench.scheduler.shares
    shares.prefill_short_step = shares.decode_short_step = 0
    return bench


def new_bench() -> Bench:
    return bench_of(Bench)


def add(bench: Bench, tenant: str, num_tokens: int, max_tokens: int = 2, *, prefill_only: bool = True) -> Sequence:
    bench.tenant = tenant
    prompt = [len(bench.sequences) % 90 + 1] * num_tokens
    return bench.add(prompt, max_tokens, prefill_only=prefill_only)


def visit(bench: Bench) -> None:
    """A light tenant was here."""
    add(bench, "light", 4)
    bench.run()


def test_a_flood_alone_fills_the_token_budget() -> None:
    bench = new_bench()
    add(bench, "flood", 400)
    assert [bench.step()[0].num_prefill_tokens for _ in range(3)] == [BUDGET] * 3


def test_on_prefill_steps_stay_short_while_a_tenant_may_come_back() -> None:
    bench = new_bench()
    visit(bench)
    add(bench, "flood", 400)
    assert [bench.step()[0].num_prefill_tokens for _ in range(3)] == [QUARTER] * 3


def test_steps_are_long_again_if_the_tenant_was_not_here_for_many_admissions() -> None:
    bench = new_bench()
    visit(bench)
    bench.scheduler.shares._turn += RECENT_TURNS
    add(bench, "flood", 400)
    bench.step()
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET


def test_a_light_prompt_takes_the_whole_budget_and_leaves_none() -> None:
    bench = new_bench()
    visit(bench)
    flood = add(bench, "flood", 400)
    bench.step()
    light = add(bench, "light", 50)
    plan, _ = bench.step()
    assert {row.sequence: row.num_tokens for row in plan.rows} == {light: 50}
    plan, _ = bench.step()
    assert {row.sequence: row.num_tokens for row in plan.rows} == {flood: QUARTER}


def test_tenants_that_all_have_prompts_waiting_share_long_steps() -> None:
    bench = new_bench()
    for _ in range(12):
        add(bench, "a", 100)
        add(bench, "b", 100)
    for _ in range(10):
        plan, _ = bench.step()
        assert plan.num_prefill_tokens == BUDGET


def test_on_decode_local_prompts_are_cut_short_while_a_light_tenant_generates() -> None:
    bench = new_bench()
    add(bench, "flood", 1500, prefill_only=False)
    bench.step()
    light = add(bench, "light", 4, 10, prefill_only=False)
    bench.step()
    while light.state is SequenceState.RUNNING:
        plan, _ = bench.step()
        assert plan.num_prefill_tokens == QUARTER and plan.num_decode_tokens == 1
    for _ in range(RETURN_STEPS):
        plan, _ = bench.step()
        assert plan.num_prefill_tokens == QUARTER, "the light tenant may be back at once"
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET


def test_on_decode_a_short_step_counts_the_decodes_of_the_tenant_whose_prompt_is_next() -> None:
    bench = bench_of(Bench)
    bench.scheduler.shares.decode_short_step = 24
    decoding = [add(bench, "flood", 4, 100, prefill_only=False) for _ in range(4)]
    bench.step()
    add(bench, "flood", 400, prefill_only=False)
    light = add(bench, "light", 4, 10, prefill_only=False)
    bench.step()
    while light.state is SequenceState.RUNNING:
        plan, _ = bench.step()
        assert (plan.num_prefill_tokens, plan.num_decode_tokens) == (24 - len(decoding), len(decoding) + 1)


def test_on_decode_steps_are_not_short_for_a_tenant_that_left_and_was_served_more() -> None:
    bench = new_bench()
    add(bench, "flood", 40, 20, prefill_only=False)
    bench.run()
    add(bench, "light", 400, 2, prefill_only=False)
    bench.scheduler.shares.of("light").counter = -1000.0
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET


def test_a_step_of_a_small_budget_is_short_as_it_is() -> None:
    bench = new_bench()
    bench.scheduler.shares.prefill_short_step = BUDGET
    visit(bench)
    add(bench, "flood", 400)
    assert [bench.step()[0].num_prefill_tokens for _ in range(3)] == [BUDGET] * 3


@pytest.mark.parametrize("prefill_only", [True, False])
def test_with_overlap_a_light_prompt_waits_only_for_the_step_in_flight(prefill_only: bool) -> None:
    bench = bench_of(OverlappedBench)
    visit(bench)
    bench.scheduler.shares._num_steps += 2 * RETURN_STEPS
    add(bench, "flood", 400, prefill_only=prefill_only)
    bench.plan()
    light = add(bench, "light", 10, prefill_only=prefill_only)
    bench.land()
    bench.plan()
    assert bench.in_flight is not None
    assert light in [row.sequence for row in bench.in_flight.rows]


def test_decodes_of_several_tenants_are_planned_ahead() -> None:
    bench = bench_of(OverlappedBench)
    for tenant in ("light", "flood"):
        add(bench, tenant, 4, 20, prefill_only=False)
    bench.plan()
    bench.land()
    bench.plan()
    assert bench.following is not None and bench.following.num_decode_tokens == 2


def test_a_flood_alone_is_planned_ahead() -> None:
    bench = bench_of(OverlappedBench)
    add(bench, "flood", 400)
    assert [plan.num_prefill_tokens for plan in bench.plan()] == [BUDGET] * 2


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 100), max_size=8),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=3),
)
def test_few_tokens_of_a_flood_are_computed_beside_a_light_prompt(
    flood: list[int], light: list[tuple[int, int]]
) -> None:
    """From its arrival between two steps until its first token: at most a quarter of the budget."""
    bench = new_bench()
    visit(bench)
    for num_tokens in [200, *flood]:  # more than all light prompts together
        add(bench, "flood", num_tokens)
    for num_steps, num_tokens in light:
        for _ in range(num_steps):
            bench.step()
        prompt, num_others = add(bench, "light", num_tokens), 0
        while not prompt.num_output:
            plan, _ = bench.step()
            num_others += sum(row.num_tokens for row in plan.rows if row.sequence is not prompt)
        assert num_others <= QUARTER
    bench.run()
    assert all(each.num_output == 1 for each in bench.sequences)
