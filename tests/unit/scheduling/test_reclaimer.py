"""Slots and blocks are taken back from tenants that hold more than their share, and only then."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.queue.fair_shares import RETURN_STEPS
from kvrelay.scheduling.reclaimer import Reclaimer
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench, ClosedGate

pytestmark = pytest.mark.unit
PREEMPTING = ["sarathi", "vllm", "simple_chunking", "orca"]
LONG = 40


def bench_for(scheduler: str = "sarathi", *, lag: float = 0.0, order: QueueOrderName = "fcfs", **sizes: int) -> Bench:
    values = {"num_blocks": 200, "token_budget": 64, "max_running": 4} | sizes
    settings = SchedulerSettings(queue_order=order)
    bench = Bench(**values, scheduler=scheduler, settings=settings, eos=99)  # type: ignore[arg-type]
    shares = bench.scheduler.shares
    shares.reclaim_lag, shares.prefill_short_step, shares.decode_short_step = lag, 0, 0
    return bench


def add(bench: Bench, tenant: str, num_prompt: int = 4, max_tokens: int = LONG, priority: int = 0) -> Sequence:
    bench.tenant = tenant
    return bench.add([len(bench.sequences) % 90 + 1] * num_prompt, max_tokens, priority)


def flooded(bench: Bench, num_sequences: int = 8, num_steps: int = 6) -> list[Sequence]:
    flood = [add(bench, "flood") for _ in range(num_sequences)]
    for _ in range(num_steps):
        bench.step()
    return flood


def running(bench: Bench) -> Counter[str]:
    return Counter(sequence.tenant for sequence in bench.scheduler.running.values())


@pytest.mark.parametrize("scheduler", PREEMPTING)
def test_a_light_tenant_gets_a_slot_at_once_and_the_flood_loses_its_latest_sequence(scheduler: str) -> None:
    bench = bench_for(scheduler)
    flood = flooded(bench)
    light = add(bench, "light", max_tokens=3)
    latest = list(bench.scheduler.running.values())[-1]
    plan, _ = bench.step()
    assert plan.preempted == [latest] and light in plan.admitted
    bench.run()
    assert light.num_output == 3 and all(each.num_output == LONG for each in flood)


def test_a_handoff_of_a_light_tenant_gets_a_slot_with_the_next_step() -> None:
    bench = bench_for()
    flooded(bench)
    bench.tenant = "light"
    light = bench.handoff([9] * 8, 3)
    assert not bench.scheduler.reserve(), "nothing is preempted between steps"
    plan, _ = bench.step()
    assert len(plan.preempted) == 1 and plan.reservations == [light]
    bench.arrive(light)
    bench.run()
    assert light.num_output == 3


def test_no_handoff_gets_blocks_of_a_victim_before_they_are_copied_to_the_host() -> None:
    """Its sender writes as soon as they are granted, and the copy is made in the step."""
    settings = SchedulerSettings(preemption="swap", num_swap_slots=64)
    bench = Bench(num_blocks=24, token_budget=96, max_running=8, settings=settings, eos=99)
    bench.scheduler.shares.reclaim_lag = 0.0
    flood = [add(bench, "flood", num_prompt=20, max_tokens=8) for _ in range(6)]
    for _ in range(3):
        bench.step()
    bench.tenant = "light"
    light = bench.handoff([9] * 24, 2)
    assert not bench.scheduler.reserve()
    plan, _ = bench.step()
    assert plan.preempted and plan.swaps is not None and plan.swaps.out.blocks
    assert plan.reservations == []
    assert list(bench.scheduler.reserve()) == [light], "once the step has landed"
    bench.arrive(light)
    bench.run()
    assert light.num_output == 2 and all(each.num_output == 8 for each in flood)


def test_nothing_is_taken_for_a_prompt_that_the_prefill_gate_may_hold_back() -> None:
    bench = bench_for()
    flooded(bench)
    bench.scheduler.prefill_gate = ClosedGate()
    add(bench, "light", max_tokens=3)
    plan, _ = bench.step()
    assert not plan.preempted and len(bench.scheduler.running) == 4


def test_many_tenants_that_hold_one_slot_each_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_for(num_blocks=400, max_running=32)
    for number in range(32):
        add(bench, f"tenant-{number}")
    for _ in range(6):
        bench.step()
    add(bench, "light", max_tokens=3)
    monkeypatch.setattr(Reclaimer, "_victims", lambda *_: pytest.fail("nobody holds more than its share"))
    plan, _ = bench.step()
    assert not plan.preempted


def test_a_tenant_claims_no_more_than_its_share_and_leaves_the_other_its_own() -> None:
    bench = bench_for(max_running=6)
    flooded(bench, num_sequences=12)
    for _ in range(12):
        add(bench, "second")
    for _ in range(8):
        bench.step()
        assert running(bench)["flood"] >= 3
    assert running(bench) == {"flood": 3, "second": 3}
    num_preempted = bench.scheduler.num_preemptions
    assert num_preempted == 3
    for _ in range(LONG // 2):
        bench.step()
    assert bench.scheduler.num_preemptions == num_preempted, "what was taken back is not taken back again"


def test_shares_follow_the_weights() -> None:
    bench = bench_for(max_running=8)
    flooded(bench, num_sequences=16)
    bench.weight = 3.0
    for _ in range(16):
        add(bench, "second")
    for _ in range(10):
        bench.step()
    assert running(bench) == {"flood": 2, "second": 6}


def test_a_tenant_that_was_served_about_equally_waits_for_a_free_slot() -> None:
    bench = bench_for(lag=1e6)
    flooded(bench)
    light = add(bench, "light", max_tokens=3)
    plan, _ = bench.step()
    assert not plan.preempted and light.state is SequenceState.WAITING


def test_nothing_is_reclaimed_while_one_tenant_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> bool:
        raise AssertionError("one tenant has no other to take from")

    monkeypatch.setattr(Reclaimer, "make_way", fail)
    bench = bench_for()
    flooded(bench)
    bench.run()
    assert not bench.scheduler.num_preemptions


def test_nothing_is_preempted_if_it_would_not_be_enough() -> None:
    """A group of three needs more than the two slots of its tenant's share."""
    bench = bench_for()
    flooded(bench)
    bench.tenant = "light"
    for index in range(3):
        bench.add([5] * 4, 3, sample=("group", index, 3))
    plan, _ = bench.step()
    assert not plan.preempted


def test_blocks_are_taken_back_too() -> None:
    bench = bench_for(num_blocks=24, max_running=8, token_budget=96)
    flood = [add(bench, "flood", num_prompt=20, max_tokens=8) for _ in range(6)]
    for _ in range(3):
        bench.step()
    assert bench.pool.num_available < blocks_for(24, BLOCK_SIZE)
    light = add(bench, "light", num_prompt=24, max_tokens=2)
    plan, _ = bench.step()
    assert plan.preempted and light in plan.admitted
    bench.run()
    assert light.num_output == 2 and all(each.num_output == 8 for each in flood)


def test_a_prefix_that_a_tenants_sequences_share_counts_once_against_its_share() -> None:
    """Two of them hold 24 of their 42 blocks, and would hold 44 if the prefix counted for each."""
    bench = bench_for(num_blocks=64, max_running=12, token_budget=800)
    bench.scheduler.shares.decode_short_step = 800
    prefix = [95] * (20 * BLOCK_SIZE)
    bench.tenant, bench.weight = "light", 2.0
    for number in range(2):
        bench.add([*prefix, 80 + number] + [1] * 4, 8)
        bench.step()
    bench.weight = 1.0
    flood = [add(bench, "flood", num_prompt=18, max_tokens=8) for _ in range(8)]
    bench.step()
    bench.scheduler.shares.of("flood").counter += 10_000
    bench.tenant, bench.weight = "light", 2.0
    third = bench.add([*prefix, 90] + [1] * 20, 2)
    plan, _ = bench.step()
    assert third in plan.admitted and {each.tenant for each in plan.preempted} == {"flood"}
    bench.run()
    assert third.num_output == 2 and all(each.num_output == 8 for each in flood)


def test_a_head_whose_cached_prefix_is_evictable_is_helped() -> None:
    """The blocks of its prefix count as available, but are not once the head holds them."""
    bench = bench_for(num_blocks=64, max_running=12, token_budget=400)
    bench.scheduler.shares.decode_short_step = 400
    prefix = [95] * (20 * BLOCK_SIZE)
    bench.tenant = "light"
    bench.add([*prefix, 80], 1)
    bench.run()
    flood = [add(bench, "flood", num_prompt=18, max_tokens=4) for _ in range(8)]
    bench.step()
    bench.scheduler.shares.of("flood").counter += 10_000
    bench.tenant = "light"
    light = bench.add([*prefix, 90] + [1] * 20, 2)
    num_missing = bench.blocks.num_at_admission(light) - bench.blocks.num_cached_blocks(light)
    assert bench.blocks.num_cached_blocks(light) == 20 and num_missing <= bench.pool.num_available < num_missing + 20
    plan, _ = bench.step()
    assert light in plan.admitted and plan.preempted
    bench.run()
    assert light.num_output == 2 and all(each.num_output == 4 for each in flood)


def test_the_copy_of_the_sequence_that_is_served_stays_on_the_host() -> None:
    """The swap space has no room for the copy of a victim besides."""
    settings = SchedulerSettings(preemption="swap", num_swap_slots=5)
    bench = Bench(num_blocks=200, token_budget=96, max_running=4, cache=False, settings=settings, eos=99)
    shares = bench.scheduler.shares
    shares.reclaim_lag = shares.idle_credit = 0.0
    for max_tokens in (4, 4, LONG):
        light = add(bench, "light", num_prompt=16, max_tokens=max_tokens)
    bench.step()
    shares.of("light").counter = 1e6
    flood = [add(bench, "flood", num_prompt=16) for _ in range(6)]
    bench.step()
    assert light.state is SequenceState.SWAPPED
    while running(bench)["flood"] < 4:
        bench.step()
    shares.of("light").counter = 0.0
    plan, _ = bench.step()
    assert plan.preempted and light in plan.admitted
    assert plan.swaps is not None and plan.swaps.back.blocks and not bench.scheduler.swap_use.num_dropped
    bench.run()
    assert light.num_output == LONG and all(each.num_output == LONG for each in flood)


def test_with_the_order_priority_a_more_urgent_sequence_is_not_preempted() -> None:
    bench = bench_for(order="priority")
    for _ in range(8):
        add(bench, "flood", priority=-1)
    for _ in range(6):
        bench.step()
    add(bench, "light")
    bench.step()
    assert not bench.scheduler.num_preemptions


def test_a_plan_made_ahead_preempts_nothing_and_asks_for_the_commit() -> None:
    bench = bench_for()
    flooded(bench)
    plan = bench.scheduler.schedule()
    light = add(bench, "light")
    assert bench.scheduler.schedule_ahead() is None
    bench.scheduler.commit(plan, bench.forward(plan))
    plan, _ = bench.step()
    assert plan.preempted and light in plan.admitted


def test_the_chunk_of_a_flood_is_short_in_the_step_that_ends_a_light_prompt() -> None:
    bench = bench_for(num_blocks=400, token_budget=128)
    bench.scheduler.shares.decode_short_step = 32
    flood = [add(bench, "flood", num_prompt=500, max_tokens=1) for _ in range(2)]
    bench.step()
    light = add(bench, "light", num_prompt=20, max_tokens=1)
    plan, _ = bench.step()
    assert {row.sequence: row.num_tokens for row in plan.rows} == {light: 20, flood[0]: 12}, "of a short step"
    for _ in range(RETURN_STEPS):
        plan, _ = bench.step()
        assert plan.num_prefill_tokens == 32, "the light tenant may be back at once"
    plan, _ = bench.step()
    assert plan.num_prefill_tokens == 128


def test_a_second_prompt_of_a_light_tenant_follows_its_first() -> None:
    bench = bench_for(num_blocks=400, token_budget=32)
    add(bench, "flood", num_prompt=500, max_tokens=1)
    bench.step()
    first, second = (add(bench, "light", num_prompt=20, max_tokens=1) for _ in range(2))
    plan, _ = bench.step()
    assert {row.sequence: row.num_tokens for row in plan.rows} == {first: 20, second: 12}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=30),
    st.integers(1, 6),
    st.sampled_from([0.0, 30.0]),
)
def test_no_slot_is_idle_while_a_sequence_waits_that_fits(
    wanted: list[tuple[int, int, int]], max_running: int, lag: float
) -> None:
    bench = bench_for(lag=lag, num_blocks=400, max_running=max_running)
    for tenant, num_prompt, max_tokens in wanted:
        add(bench, f"t{tenant}", num_prompt, max_tokens)
        plan, _ = bench.step()
        if len(bench.scheduler.waiting) and len(plan.rows) < max_running:
            # The budget is 64; a step that ends a light tenant's prompt leaves 16 to the others.
            assert plan.num_prefill_tokens + plan.num_decode_tokens >= 16, plan.held_back


jobs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=10)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 4.0]), jobs), min_size=2, max_size=4),
    st.sampled_from(["fcfs", "lpm", "sjf", "priority"]),
    st.integers(1, 6),
    st.sampled_from([20, 40, 200]),
    st.sampled_from([0.0, 30.0]),
)
def test_any_mix_of_tenants_ends_with_all_tokens(
    scheduler: str,
    tenants: list[tuple[float, list[tuple[int, int]]]],
    order: QueueOrderName,
    max_running: int,
    num_blocks: int,
    lag: float,
) -> None:
    bench = bench_for(scheduler, lag=lag, order=order, num_blocks=num_blocks, max_running=max_running)
    numbers = count()
    for turn in range(max(len(wanted) for _, wanted in tenants)):
        for name, (weight, wanted) in enumerate(tenants):
            if turn < len(wanted):
                bench.weight = weight
                num_prompt, max_tokens = wanted[turn]
                add(bench, f"t{name}", num_prompt, max_tokens, priority=next(numbers) % 3 - 1)
        bench.step()
    bench.run()
    for sequence in bench.sequences:
        assert sequence.num_output == sequence.sampling.max_tokens
