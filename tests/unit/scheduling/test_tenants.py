"""Fair shares among tenants: bounded differences, weights, light tenants beside floods, and no cost for one tenant."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.scheduling.fair_shares import MAX_IDLE_TENANTS, OUTPUT_COST, FairShares
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import SCHEDULERS, Bench, make_sequence

LONGEST_PROMPT, MOST_OUTPUT, MAX_RUNNING = 24, 12, 4

jobs = st.lists(st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, MOST_OUTPUT)), min_size=1, max_size=8)
orders = st.sampled_from(["fcfs", "lpm", "dfs_weight", "sjf", "random"])


def served(sequences: list[Sequence]) -> float:
    """Tokens that count, of sequences that were admitted at least once; no prefix is cached in these tests."""
    admitted = [each for each in sequences if each.table.num_blocks or each.num_output or each.num_preemptions]
    return sum(each.num_prompt + OUTPUT_COST * each.num_output for each in admitted)


class Flood:
    """Tenants that always have requests waiting: `jobs[tenant]` is repeated."""

    def __init__(self, bench: Bench, weights: dict[str, float], jobs: dict[str, list[tuple[int, int]]]) -> None:
        self.bench, self.weights, self.jobs = bench, weights, jobs
        self.sequences: dict[str, list[Sequence]] = {tenant: [] for tenant in weights}
        self._number = 0

    def fill(self) -> None:
        """Queues so many requests that every tenant still waits after the next step."""
        for tenant, weight in self.weights.items():
            waiting = sum(each.origin.owner == tenant for each in self.bench.scheduler.waiting)
            for _ in range(waiting, 2 * MAX_RUNNING):
                self.add(tenant, weight)

    def add(self, tenant: str, weight: float) -> None:
        wanted = self.jobs[tenant]
        num_prompt, num_output = wanted[len(self.sequences[tenant]) % len(wanted)]
        self._number += 1
        prompt = [self._number % 97 + 1] * num_prompt
        self.bench.tenant, self.bench.weight = tenant, weight
        self.sequences[tenant].append(self.bench.add(prompt, num_output))

    def shares(self) -> dict[str, float]:
        return {tenant: served(each) / self.weights[tenant] for tenant, each in self.sequences.items()}


def bench_for(order: QueueOrderName = "fcfs", scheduler: str = "sarathi", **sizes: int) -> Bench:
    values = {"num_blocks": 64, "token_budget": 16, "max_running": MAX_RUNNING} | sizes
    bench = Bench(
        **values,  # type: ignore[arg-type]
        cache=False,
        scheduler=scheduler,
        settings=SchedulerSettings(queue_order=order, queue_starvation_bound=4),
        eos=99,
    )
    bench.scheduler.lifecycle.shares.idle_credit = 0.0
    return bench


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(40), deadline=None)
@given(jobs, jobs, st.sampled_from([1.0, 2.0, 5.0]), orders, st.sampled_from([20, 64]))
def test_tenants_that_always_wait_are_served_equally_by_weight(
    scheduler: str,
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    weight: float,
    order: QueueOrderName,
    num_blocks: int,
) -> None:
    """At every step, up to what the paper's bound allows: one prompt, and the output of what runs."""
    bench = bench_for(order, scheduler, num_blocks=num_blocks)
    flood = Flood(bench, {"a": weight, "b": 1.0}, {"a": first, "b": second})
    bound = 2 * (LONGEST_PROMPT + OUTPUT_COST * MAX_RUNNING * MOST_OUTPUT)
    for _ in range(60):
        flood.fill()
        bench.step()
        a, b = flood.shares().values()
        assert abs(a - b) <= bound


@pytest.mark.parametrize("order", ["fcfs", "lpm", "dfs_weight", "sjf", "random"])
def test_a_request_beside_a_flood_is_next_although_the_flood_waits_longer_than_the_starvation_bound(
    order: QueueOrderName,
) -> None:
    bench = bench_for(order)
    flood = Flood(bench, {"flood": 1.0}, {"flood": [(8, 8)]})
    for _ in range(30):
        flood.fill()
        bench.step()
    bench.tenant = "light"
    light = bench.add([5] * 4, 2)
    others: list[Sequence] = []
    while not light.num_output:
        flood.fill()
        plan, _ = bench.step()
        others += [each for each in plan.admitted if each is not light]
    assert len(others) <= 1, "at most one that was ahead by the tenants' counters"


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one_of_another_tenant() -> None:
    bench = bench_for(num_blocks=200)
    bench.scheduler.lifecycle.shares.idle_credit = 64.0
    bench.tenant = "long"
    long = [bench.add([7] * 400, 1) for _ in range(2)]
    bench.step()
    bench.tenant = "short"
    short = bench.add([5] * 40, 1)
    for _ in range(3):
        bench.step()
    assert short.num_output == 1
    assert 0 < long[0].num_computed < 400
    bench.run()
    assert all(each.num_output == 1 for each in long)


def test_a_light_tenant_keeps_its_lead_until_its_credit_is_used_up() -> None:
    def admitted_before(credit: float) -> int:
        """Of ten requests of a light tenant, how many are admitted before the flood's next one."""
        bench = bench_for(max_running=1)
        bench.scheduler.lifecycle.shares.idle_credit = credit
        flood = Flood(bench, {"flood": 1.0}, {"flood": [(8, 2)]})
        for _ in range(10):
            flood.fill()
            bench.step()
        bench.tenant, bench.weight = "light", 1.0
        for _ in range(10):
            bench.add([5] * 8, 1)
        admitted: list[str] = []
        while "flood" not in admitted or "light" not in admitted:
            flood.fill()
            plan, _ = bench.step()
            admitted += [each.origin.owner for each in plan.admitted]
        return admitted.count("light") - admitted.index("light")

    assert admitted_before(credit=60.0) > admitted_before(credit=0.0)


def test_output_counts_for_sequences_that_leave_and_for_those_that_run() -> None:
    bench = bench_for()
    for tenant in ("a", "b"):
        bench.tenant = tenant
        bench.add([3] * 4, 3)
    running = bench.add([4] * 4, 6)
    while running.num_output < 5:
        bench.step()
    bench.scheduler.lifecycle.shares.settle()
    assert bench.scheduler.lifecycle.shares.counter(running) == 4 + 3 * OUTPUT_COST + 4 + 5 * OUTPUT_COST


def test_nothing_is_counted_per_step_while_one_tenant_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shares: FairShares) -> None:
        raise AssertionError("output was counted")

    monkeypatch.setattr(FairShares, "settle", fail)
    bench = bench_for()
    bench.tenant = "alone"
    for number in range(12):
        bench.add([number + 1] * 6, 4)
    bench.run()


def test_a_preemption_takes_from_the_tenant_that_was_served_most() -> None:
    bench = bench_for(num_blocks=12, token_budget=32)
    bench.tenant = "heavy"
    heavy = [bench.add([n + 1] * 12, 30) for n in range(3)]
    bench.step()
    bench.tenant = "light"
    light = bench.add([9] * 4, 20)
    preempted: Counter[str] = Counter()
    while light.num_output != 20:
        plan, _ = bench.step()
        preempted.update(each.origin.owner for each in plan.preempted)
    assert preempted["heavy"] and not preempted["light"]
    bench.run()
    assert all(each.num_output == 30 for each in heavy)


def test_a_preempted_sequence_does_not_precede_a_tenant_that_was_served_less() -> None:
    bench = bench_for(num_blocks=12, token_budget=32, max_running=3)
    bench.tenant = "heavy"
    heavy = [bench.add([n + 1] * 12, 20) for n in range(3)]
    while not bench.scheduler.num_preemptions:
        bench.step()
    bench.tenant = "light"
    light = bench.add([9] * 2, 1)
    assert bench.scheduler.waiting.head() is light
    bench.run()
    assert all(each.num_output == 20 for each in heavy)


def test_with_the_order_priority_the_share_decides_between_equals() -> None:
    bench = bench_for("priority", max_running=1)
    bench.tenant = "heavy"
    bench.add([1] * 8, 1)
    bench.step()
    normal, urgent = bench.add([2] * 4, 1), bench.add([3] * 4, 1, priority=-5)
    bench.tenant = "light"
    light = bench.add([4] * 4, 1)
    admitted = [each for plan in bench.run() for each in plan.admitted]
    assert admitted == [urgent, light, normal]


def test_a_flood_of_urgent_requests_does_not_starve_another_tenant() -> None:
    bench = bench_for("priority", max_running=1)
    bench.tenant = "light"
    light = bench.add([4] * 4, 1)
    bench.tenant = "urgent"
    num_admitted = 0
    while not light.num_output:
        bench.add([1] * 4, 1, priority=-5)
        bench.add([1] * 4, 1, priority=-5)
        plan, _ = bench.step()
        num_admitted += len(plan.admitted)
    assert num_admitted <= 6


def test_handoffs_have_fair_turns_too() -> None:
    bench = bench_for(max_running=1)
    bench.tenant = "flood"
    flood = [bench.handoff([n + 1] * 8, 3) for n in range(4)]
    (first,) = bench.scheduler.reserve()
    assert first is flood[0]
    bench.tenant = "light"
    light = bench.handoff([9] * 8, 3)
    bench.arrive(first)
    while first.num_output < 3:
        bench.step()
    assert bench.scheduler.reserve() == [light]


def test_tenants_that_are_gone_are_forgotten_beyond_a_limit() -> None:
    shares = FairShares({}, 8)
    for number in range(2 * MAX_IDLE_TENANTS):
        sequence = make_sequence([1], 1, f"r{number}")
        sequence.origin.owner = f"t{number}"
        shares.enter(sequence)
        shares.begins_to_wait(sequence.origin.owner)
        shares.stops_waiting(sequence.origin.owner)
        shares.leave(sequence)
    assert len(shares._idle) == MAX_IDLE_TENANTS


def test_while_tenants_wait_none_holds_more_slots_than_its_share() -> None:
    """The flood's short prompts count little when they are admitted, and its long outputs only as they come."""
    bench = bench_for(num_blocks=200, token_budget=64, max_running=8)
    bench.scheduler.lifecycle.shares.idle_credit = 4096.0
    flood = Flood(bench, {"long": 3.0, "short": 1.0}, {"long": [(1, 12)], "short": [(24, 1)]})
    for _ in range(40):
        flood.fill()
        bench.step()
        held = [each.origin.owner for each in bench.scheduler.running.values()]
        assert held.count("long") <= 6 and held.count("short") <= 2
    bench.scheduler.lifecycle.shares.check_integrity()


def test_slots_that_no_other_tenant_waits_for_are_used() -> None:
    bench = bench_for(num_blocks=200, token_budget=64, max_running=8)
    bench.tenant = "light"
    bench.add([1] * 4, 12)
    bench.step()
    bench.tenant = "flood"
    for number in range(8):
        bench.add([number + 2] * 4, 12)
    bench.step()
    assert len(bench.scheduler.running) == 8
