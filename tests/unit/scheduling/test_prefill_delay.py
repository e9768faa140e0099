"""When prompts are let in: the decision against an obvious oracle, and a group of ranks that steps together."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product

import pytest

from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, DelayerState, LocalExchange, RankLoad, decide
from kvrelay.worker.prefill_delayer import PrefillDelayer
from tests.fakes.rank_group import RankGroup
from tests.unit.scheduling.bench import Bench

pytestmark = pytest.mark.unit
MAX_RUNNING = 4


def oracle(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> bool:
    """The rule, spelled out case by case."""
    asking = [load for load in loads if load.prefillable]
    if len(asking) == 0:
        return True
    if len(asking) < len(loads):
        if any(load.forced for load in asking):
            return True
        return state.num_delayed + 1 >= settings.max_delay_passes
    if not state.all_had:
        return True
    fullest = max(load.num_running for load in loads)
    batch = min(max(load.largest_prefill for load in loads), settings.max_running)
    return settings.max_running - fullest >= batch


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_decision(num_ranks: int) -> None:
    kinds = [(0, 0), (1, 0), (1, 1)]
    sizes = [(0, 0), (1, 2), (3, 1), (4, 6)] if num_ranks < 3 else [(0, 0), (3, 2)]
    ranks = [RankLoad(*kind, *size) for kind, size in product(kinds, sizes)]
    states = [DelayerState(delayed, had) for delayed, had in product(range(4), (False, True))]
    for loads, state, passes in product(product(ranks, repeat=num_ranks), states, (1, 2, 4)):
        settings = DelayerSettings(MAX_RUNNING, passes)
        after, decision = decide(state, loads, settings)
        assert decision.allowed == oracle(state, loads, settings), (state, loads, passes)
        prefillable = [load.prefillable for load in loads]
        if any(prefillable):
            assert after.num_delayed == (0 if decision.allowed else state.num_delayed + 1)
        else:
            assert after == state
        assert after.all_had == (state.all_had or all(prefillable))
        mirrored = decide(state, loads[::-1], settings)
        assert mirrored == (after, decision), "ranks would decide differently"


def test_alone_prompts_wait_for_room_for_a_batch_of_them() -> None:
    """Three were admitted at once before; then one slot is free, and the next prompt waits until three are."""
    bench = Bench(num_blocks=64, token_budget=64, max_running=MAX_RUNNING)
    now = iter(range(1000))
    delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING), LocalExchange(), lambda: float(next(now)))
    bench.scheduler.prefill_gate = delayer
    for max_tokens in (3, 6, 9):
        bench.add([1, 2, 3], max_tokens)
    assert len(bench.step()[0].admitted) == 3
    late = bench.add([4, 5, 6], 2)
    plans = bench.run()
    admitted = [number for number, plan in enumerate(plans) if late in plan.admitted]
    assert [plan.held_back for plan in plans[: admitted[0]]] == [
        "delayed: all have prompts, but too few slots are free"
    ] * admitted[0]
    assert admitted == [5]  # when two of the three have ended
    assert delayer.totals.num_delayed_passes == 5
    assert delayer.totals.waiting_s == 1.0
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (2, 0)


def test_allowed_and_yet_nothing_ran() -> None:
    bench = Bench(num_blocks=2, token_budget=64, max_running=MAX_RUNNING, cache=False)
    bench.scheduler.prefill_gate = delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING), LocalExchange())
    bench.add([1] * 7, 1)
    bench.add([2] * 7, 1)
    bench.scheduler.schedule()
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (1, 0)
    other = Bench(num_blocks=2, token_budget=64, max_running=MAX_RUNNING, cache=False)
    other.scheduler.prefill_gate = delayer = PrefillDelayer(DelayerSettings(MAX_RUNNING), LocalExchange())
    other.add([1] * 5, 2)
    other.step()
    other.add([2] * 7, 1)
    other.scheduler.schedule()
    assert (delayer.totals.num_ran, delayer.totals.num_idle) == (1, 1)


def test_a_nearly_empty_cache_does_not_wait_for_others() -> None:
    group = RankGroup(2)
    delayers = [
        PrefillDelayer(DelayerSettings(MAX_RUNNING, 9, low_watermark), group.exchange(rank))
        for rank, low_watermark in enumerate((0.25, 0.25))
    ]
    with ThreadPoolExecutor(2) as pool:
        for usage, reason in ((0.5, "delayed: some have no prompt"), (0.2, "")):
            asked = pool.submit(delayers[0].ask, 0, usage)
            delayers[1].passed(0, 0)
            assert asked.result() == reason
            assert delayers[0].ask(0, 1.0) == reason, "decided once a pass"
            delayers[0].passed(0, int(not reason))
    assert group.num_exchanges == 2


@dataclass
class Ran:
    """What a group's passes were like."""

    num_uneven: int = 0  # passes in which some ranks computed prompts beside others' decodes alone
    longest_wait: int = 0  # passes in a row in which prompts of some ranks were held back for the others
    tokens: list[list[int]] = field(default_factory=list)


def run_group(num_ranks: int, seed: int, max_delay_passes: int | None) -> Ran:
    """Ranks in step, with arrivals of their own; a forward draws the next integer."""
    rng = random.Random(seed)
    group, ran = RankGroup(num_ranks), Ran()
    benches = [Bench(num_blocks=256, token_budget=64, max_running=8, cache=False) for _ in range(num_ranks)]
    if max_delay_passes is not None:
        for rank, bench in enumerate(benches):
            settings = DelayerSettings(8, max_delay_passes)
            bench.scheduler.prefill_gate = PrefillDelayer(settings, group.exchange(rank))
    arrivals = [sorted(rng.choices(range(200), k=30)) for _ in benches]
    waits = [0] * num_ranks
    with ThreadPoolExecutor(num_ranks) as pool:
        number = 0
        while any(arrivals) or any(bench.scheduler.has_work for bench in benches):
            for bench, due in zip(benches, arrivals, strict=True):
                while due and due[0] <= number:
                    del due[0]
                    bench.add([1 + rng.randrange(7)] * rng.randint(4, 30), rng.randint(2, 40))
            plans = list(pool.map(lambda bench: bench.scheduler.schedule(), benches))
            prompts = [plan.num_prefill_tokens > 0 for plan in plans]
            only_decodes = [plan.num_decode_tokens > 0 and not plan.num_prefill_tokens for plan in plans]
            ran.num_uneven += any(prompts) and any(only_decodes)
            for rank, plan in enumerate(plans):
                waits[rank] = waits[rank] + 1 if plan.held_back == "delayed: some have no prompt" else 0
            ran.longest_wait = max(ran.longest_wait, *waits)
            for bench, plan in zip(benches, plans, strict=True):
                bench.scheduler.commit(plan, bench.forward(plan, 5))
                bench.check_pool()
            number += 1
            assert number < 5000, "it does not end"
    if max_delay_passes is not None:
        assert group.num_exchanges == number, "one exchange a pass"
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


def test_a_bound_of_one_pass_is_no_delay() -> None:
    assert run_group(2, 1, 1).longest_wait == 0


def test_what_was_delayed_behind_a_step_is_asked_again_after_it() -> None:
    """All that ran ended in the step in flight: the pass behind it was decided while they still counted."""
    bench = Bench(num_blocks=64, token_budget=64, max_running=3)
    bench.scheduler.prefill_gate = PrefillDelayer(DelayerSettings(3), LocalExchange())
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
