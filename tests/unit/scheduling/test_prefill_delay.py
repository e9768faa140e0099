"""When prompts are let in: the decision against an obvious oracle, and a group of ranks that steps together."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import product

import pytest

from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, DelayerState, PrefillDelayer, RankLoad, decide
from tests.unit.scheduling.bench import Bench

MAX_RUNNING = 4


def oracle(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> tuple[bool, str, str]:
    """The rule, spelled out case by case."""
    asking = [load for load in loads if load.prefillable]
    if len(asking) == 0:
        return True, "none", ""
    status = "all" if len(asking) == len(loads) else "mixed"
    if any(load.overdue for load in loads):
        return True, status, "wait_timeout"
    if status == "mixed":
        waited = state.num_delayed + 1 >= settings.max_delay_passes
        return waited, status, "wait_timeout" if waited else "delay"
    if state.has_let_through and lacks_slots(loads, settings):
        return False, status, "delay"
    return True, status, "wait_success" if state.num_delayed else "no_wait"


def lacks_slots(loads: Seq[RankLoad], settings: DelayerSettings) -> bool:
    fullest = max(load.num_running for load in loads)
    return settings.max_running - fullest < min(max(load.largest_prefill for load in loads), settings.max_running)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_decision(num_ranks: int) -> None:
    kinds = [(0, 0), (1, 0), (1, 1)]
    sizes = [(0, 0), (1, 2), (3, 1), (4, 6)] if num_ranks < 3 else [(0, 0), (3, 2)]
    ranks = [RankLoad(kind[0], *size, kind[1]) for kind, size in product(kinds, sizes)]
    states = [DelayerState(delayed, let) for delayed, let in product(range(4), (False, True))]
    for loads, state, passes in product(product(ranks, repeat=num_ranks), states, (1, 2, 4)):
        settings = DelayerSettings(MAX_RUNNING, passes)
        after, decision = decide(state, loads, settings)
        expected = oracle(state, loads, settings)
        assert (decision.allowed, decision.estimation, decision.reason) == expected, (state, loads, passes)
        assert after.num_delayed == (0 if decision.allowed else state.num_delayed + 1)
        first = decision.reason in ("no_wait", "wait_success") and lacks_slots(loads, settings)
        assert after.has_let_through == (state.has_let_through or first)
        assert decide(state, loads[::-1], settings) == (after, decision), "ranks would decide differently"


def test_alone_prompts_wait_for_room_for_a_batch_of_them() -> None:
    """Three were admitted at once before; then one slot is free. The next prompt is let through, as it is the first,
    and the one after it waits until three are."""
    bench = Bench(num_blocks=64, token_budget=64, max_running=MAX_RUNNING)
    now = iter(range(1000))
    delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING), lambda: float(next(now)))
    bench.scheduler.admission.prefill_gate = delayer
    for max_tokens in (3, 6, 9):
        bench.add([1, 2, 3], max_tokens)
    assert len(bench.step()[0].admitted) == 3
    first = bench.add([1, 2, 4], 1)
    assert bench.step()[0].admitted == [first]
    late = bench.add([4, 5, 6], 2)
    plans = bench.run()
    admitted = [number for number, plan in enumerate(plans) if late in plan.admitted]
    assert [plan.held_back for plan in plans[: admitted[0]]] == ["delayed: too few slots are free"] * admitted[0]
    assert admitted == [4]  # when two of the three have ended
    assert delayer.totals.num_delayed_passes == 4
    assert delayer.totals.waiting_s == 1.0
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (3, 0)
    assert delayer.totals.outcomes["all", "delay"] == 4
    assert delayer.totals.outcomes["all", "wait_success"] == 1


def test_allowed_and_yet_nothing_ran() -> None:
    bench = Bench(num_blocks=2, token_budget=64, max_running=MAX_RUNNING, cache=False)
    bench.scheduler.admission.prefill_gate = delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING))
    bench.add([1] * 7, 1)
    bench.add([2] * 7, 1)
    bench.scheduler.schedule()
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (1, 0)
    other = Bench(num_blocks=2, token_budget=64, max_running=MAX_RUNNING, cache=False)
    other.scheduler.admission.prefill_gate = delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING))
    other.add([1] * 5, 2)
    other.step()
    other.add([2] * 7, 1)
    other.scheduler.schedule()
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (1, 1)


def begin_pass(delayers: list[PrefillDelayer], prefillable: Seq[bool]) -> None:
    loads = [each.load(0, prefillable=has) for each, has in zip(delayers, prefillable, strict=True)]
    for rank, delayer in enumerate(delayers):
        delayer.begin_pass(loads, rank)


def test_a_rank_that_had_no_prompt_in_the_exchange_admits_none() -> None:
    """Others decided without it: the decision that no rank has a prompt allows prompts."""
    delayers = [PrefillDelayer(DelayerSettings(MAX_RUNNING)) for _ in range(2)]
    begin_pass(delayers, [False, False])
    assert delayers[0].ask(0) == "delayed: there was no prompt when the pass began"
    delayers[0].passed(0, 0)
    assert (delayers[0].totals.num_ran, delayers[0].totals.num_idle) == (0, 0)


def test_one_rank_whose_prompt_waited_too_long_ends_the_wait_of_all() -> None:
    now = [0.0]
    settings = DelayerSettings(MAX_RUNNING, 1000, max_wait_s=2.0)
    delayers = [PrefillDelayer(settings, lambda: now[0]) for _ in range(3)]
    for at, has, reason in (
        (0.0, (True, False, False), "delayed: some ranks have no prompt"),
        (1.0, (True, True, False), "delayed: some ranks have no prompt"),
        (1.9, (True, True, False), "delayed: some ranks have no prompt"),
        (2.0, (True, True, False), ""),
    ):
        now[0] = at
        begin_pass(delayers, has)
        assert [each.ask(0) for each, asks in zip(delayers, has, strict=True) if asks] == [reason] * sum(has)
        for each in delayers:
            each.passed(0, 0)
    assert [each.totals.waiting_s for each in delayers] == [2.0, 1.0, 0.0]
    assert all(each.totals.outcomes == {("mixed", "delay"): 3, ("mixed", "wait_timeout"): 1} for each in delayers)


def test_outcomes_are_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    delayers = [PrefillDelayer(DelayerSettings(MAX_RUNNING)) for _ in range(2)]
    for has in ((False, False), (True, False)):
        begin_pass(delayers, has)
        delayers[0].passed(0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "prefill delayer: mixed ranks have a prompt: delay (delay), 1 passes delayed; 0 admitted here"
    ]


@dataclass
class Ran:
    """What a group's passes were like."""

    num_uneven: int = 0  # passes in which some ranks computed prompts beside others' decodes alone
    longest_wait: int = 0  # passes in a row in which prompts of some ranks were held back for the others
    tokens: list[list[int]] = field(default_factory=list)


def run_group(num_ranks: int, seed: int, max_delay_passes: int | None) -> Ran:
    """Ranks in step, with arrivals of their own; a forward draws the next integer."""
    rng = random.Random(seed)
    ran = Ran()
    benches = [Bench(num_blocks=256, token_budget=64, max_running=8, cache=False) for _ in range(num_ranks)]
    delayers: list[PrefillDelayer] = []
    if max_delay_passes is not None:
        delayers = [PrefillDelayer(DelayerSettings(8, max_delay_passes)) for _ in benches]
        for bench, delayer in zip(benches, delayers, strict=True):
            bench.scheduler.admission.prefill_gate = delayer
    arrivals = [sorted(rng.choices(range(200), k=30)) for _ in benches]
    waits = [0] * num_ranks
    number = 0
    while any(arrivals) or any(bench.scheduler.has_work for bench in benches):
        for bench, due in zip(benches, arrivals, strict=True):
            while due and due[0] <= number:
                del due[0]
                bench.add([1 + rng.randrange(7)] * rng.randint(4, 30), rng.randint(2, 40))
        loads = [
            delayer.load(len(bench.scheduler.running), prefillable=bench.scheduler.admission.may_admit_prompt)
            for bench, delayer in zip(benches, delayers, strict=bool(delayers))
        ]
        for rank, delayer in enumerate(delayers):
            delayer.begin_pass(loads, rank)
        plans = [bench.scheduler.schedule() for bench in benches]
        prompts = [plan.num_prefill_tokens > 0 for plan in plans]
        only_decodes = [plan.num_decode_tokens > 0 and not plan.num_prefill_tokens for plan in plans]
        ran.num_uneven += any(prompts) and any(only_decodes)
        for rank, plan in enumerate(plans):
            waits[rank] = waits[rank] + 1 if plan.held_back == "delayed: some ranks have no prompt" else 0
        ran.longest_wait = max(ran.longest_wait, *waits)
        for bench, plan in zip(benches, plans, strict=True):
            bench.scheduler.commit(plan, bench.forward(plan, 5))
            bench.check_pool()
        number += 1
        assert number < 5000, "it does not end"
    for delayer in delayers:
        assert delayer.totals.outcomes.total() == number, "one decision a pass"
        assert delayer._state == delayers[0]._state
    ran.tokens = [[s.num_tokens for s in bench.sequences] for bench in benches]
    return ran


@pytest.mark.everyday(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_computes_prompts_together_within_bounds(num_ranks: int, seed: int) -> None:
    without, with_delayer = (run_group(num_ranks, seed, passes) for passes in (None, 8))
    assert with_delayer.num_uneven < 0.75 * without.num_uneven
    assert 0 < with_delayer.longest_wait <= 8 - 1
    assert with_delayer.tokens == without.tokens


def test_what_was_delayed_behind_a_step_is_asked_again_after_it() -> None:
    """All that ran ended in the step in flight: the pass behind it was decided while they still counted."""
    bench = Bench(num_blocks=64, token_budget=64, max_running=3)
    bench.scheduler.admission.prefill_gate = delayer = PrefillDelayer(DelayerSettings(3))
    delayer._state = DelayerState(has_let_through=True)
    for _ in range(2):
        bench.add([1, 2, 3], 2)
    bench.step()
    last = bench.scheduler.schedule()
    late = bench.add([4, 5, 6], 2)
    assert bench.scheduler.schedule_ahead() is None
    bench.scheduler.commit(last, bench.forward(last))
    empty = bench.scheduler.schedule()
    assert (list(empty.rows), empty.delayed) == ([], True)
    assert bench.scheduler.schedule().admitted == [late]
