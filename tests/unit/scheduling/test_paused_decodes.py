"""Decodes of a flood leave the step of a light tenant's prompt, and no others do."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_planner import MAX_PAUSED_STEPS
from tests.thoroughness import examples
from tests.unit.scheduling.bench import Bench, ClosedGate
from tests.unit.scheduling.overlapped import OverlappedBench

pytestmark = pytest.mark.unit
BUDGET, NUM_DECODES = 32, 8
LONG = 80


def new_bench(kind: type[Bench] = Bench, *, num_blocks: int = 2000, settings: SchedulerSettings | None = None) -> Bench:
    bench = kind(num_blocks, token_budget=BUDGET, max_running=16, cache=False, eos=99, settings=settings)
    shares = bench.scheduler.shares
    shares.reclaim_lag, shares.idle_credit, shares.decode_short_step = 2.0, 4096.0, 0
    return bench


def add(bench: Bench, tenant: str, num_tokens: int, max_tokens: int = LONG) -> Sequence:
    bench.tenant = tenant
    return bench.add([len(bench.sequences) % 90 + 1] * num_tokens, max_tokens)


def flooded(bench: Bench, num_decodes: int = NUM_DECODES) -> list[Sequence]:
    """A flood decodes, and was served more than a tenant that comes now."""
    flood = [add(bench, "flood", 3) for _ in range(num_decodes)]
    while not all(each.num_output for each in flood):
        bench.step()
    bench.scheduler.shares.of("flood").counter += 1000
    return flood


def test_a_light_prompt_takes_the_whole_budget_then_what_it_needs() -> None:
    bench = new_bench()
    flood = flooded(bench)
    light = add(bench, "light", BUDGET + 5, 1)
    plan, _ = bench.step()
    assert [(row.sequence, row.num_tokens) for row in plan.rows] == [(light, BUDGET)]
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == 5 and plan.num_decode_tokens == NUM_DECODES, "there is room for both"
    bench.run()
    assert all(each.num_output == LONG for each in flood)


def test_only_as_many_decodes_are_paused_as_the_prompt_needs() -> None:
    bench = new_bench()
    flooded(bench)
    add(bench, "light", BUDGET - NUM_DECODES + 3, 1)
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET - NUM_DECODES + 3 and plan.num_decode_tokens == NUM_DECODES - 3


def test_decodes_are_paused_in_few_steps_in_a_row_however_long_the_prompt_is() -> None:
    bench = new_bench()
    flooded(bench)
    light = add(bench, "light", 10 * BUDGET, 1)
    decodes = []
    while light.state is not SequenceState.FINISHED:
        plan, _ = bench.step()
        decodes.append(plan.num_decode_tokens)
    period = [0] * MAX_PAUSED_STEPS + [NUM_DECODES]
    assert decodes[:9] == period * 3 and MAX_PAUSED_STEPS == 2


def test_decodes_of_a_tenant_that_has_no_more_sequences_are_not_paused() -> None:
    bench = new_bench()
    flooded(bench, num_decodes=1)
    add(bench, "light", BUDGET, 1)
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET - 1 and plan.num_decode_tokens == 1


def test_decodes_of_a_tenant_that_was_served_about_the_same_are_not_paused() -> None:
    bench = new_bench()
    flooded(bench)
    shares = bench.scheduler.shares
    add(bench, "light", BUDGET, 1)
    shares.reclaim_lag = 500.0
    shares.of("light").counter = shares.of("flood").counter - 500.0
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == BUDGET - NUM_DECODES and plan.num_decode_tokens == NUM_DECODES


def test_decodes_are_not_paused_for_a_prompt_that_is_not_admitted() -> None:
    bench = new_bench()
    flooded(bench)
    bench.scheduler.prefill_gate = ClosedGate()
    add(bench, "light", BUDGET, 1)
    for _ in range(3):
        plan, _ = bench.step()
        assert plan.num_decode_tokens == NUM_DECODES and not plan.num_prefill_tokens


prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * BUDGET)), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", [Bench, OverlappedBench])
@settings(max_examples=examples(20), deadline=None)
@given(prompts, st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), max_size=6))
def test_a_light_prompt_takes_as_many_steps_as_alone(
    kind: type[Bench], light: list[tuple[int, int]], flood: list[tuple[int, int]]
) -> None:
    """From the first step planned after its arrival; one of up to two budgets, beside decodes and prompts of a flood.
    All sequences end with all their tokens."""
    bench = new_bench(kind)
    flooded(bench)
    for num_tokens, max_tokens in flood:
        add(bench, "flood", num_tokens, max_tokens)
    for num_steps, num_tokens in light:
        for _ in range(num_steps):
            bench.step()
        prompt, num_mine = add(bench, "light", num_tokens, 1), 0
        while not prompt.num_output:
            plan, _ = bench.step()
            num_mine += any(row.sequence is prompt for row in plan.rows)
            assert num_mine or kind is OverlappedBench, "it is in the next step that is planned"
        assert num_mine == ceil(num_tokens / BUDGET)
        for _ in range(MAX_PAUSED_STEPS + 1):  # decodes that were paused twice are next
            bench.step()
    bench.run()
    assert all(each.num_tokens == each.max_length for each in bench.sequences)
