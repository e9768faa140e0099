"""Decodes of a flood take turns if they make the steps of a light tenant's decodes much longer."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.queue.decode_turns import LEAST_TURNS, MOST_SLOWDOWN, PROBE_EVERY_STEPS
from kvrelay.scheduling.sequence import Sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import Bench
from tests.unit.scheduling.overlapped import OverlappedBench

pytestmark = pytest.mark.unit
FIXED_S = 100.0
LONG = 400


def add(bench: Bench, tenant: str, max_tokens: int = LONG) -> Sequence:
    bench.tenant = tenant
    return bench.add([len(bench.sequences) % 90 + 1] * 3, max_tokens)


def flooded(kind: type[Bench], num_flood: int, token_s: float, *, num_light: int = 1, least: int = 1) -> Bench:
    """A flood decodes, and a light tenant beside it. A step takes `FIXED_S` and `token_s` for each row."""
    bench = kind(4000, token_budget=128, max_running=64, cache=False, eos=99)
    bench.step_s = lambda plan: FIXED_S + token_s * len(plan.rows)
    bench.scheduler.turns.least_turns = least
    sequences = [*(add(bench, "flood") for _ in range(num_flood)), *(add(bench, "light") for _ in range(num_light))]
    while not all(each.num_output for each in sequences):
        bench.step()
    bench.scheduler.shares.of("flood").counter += 10_000
    return bench


def rows_of(plan: StepPlan, tenant: str) -> int:
    return sum(row.sequence.tenant == tenant for row in plan.rows)


@pytest.mark.parametrize("kind", [Bench, OverlappedBench])
def test_steps_are_at_most_so_much_longer(kind: type[Bench]) -> None:
    bench = flooded(kind, 40, token_s=4.0)
    steps = [bench.step()[0] for _ in range(PROBE_EVERY_STEPS)]
    alone_s = FIXED_S + 4.0
    assert min(rows_of(plan, "flood") for plan in steps) == 0, "a step measured the time without the flood"
    for plan in steps[8:]:
        assert rows_of(plan, "light") == 1
        assert bench.step_s(plan) <= MOST_SLOWDOWN * alone_s
        assert rows_of(plan, "flood") in (0, int((MOST_SLOWDOWN - 1) * alone_s / 4.0))


def test_no_decode_rests_if_all_cost_little_but_for_the_steps_that_measure() -> None:
    bench = flooded(Bench, 40, token_s=0.8)
    num_rows = [rows_of(bench.step()[0], "flood") for _ in range(3 * PROBE_EVERY_STEPS)]
    assert sorted(set(num_rows)) == [0, 40] and num_rows.count(0) == 3


def test_as_many_decodes_as_a_lighter_tenant_has_do_not_rest() -> None:
    bench = flooded(Bench, 24, token_s=50.0, num_light=20)
    num_rows = [rows_of(bench.step()[0], "flood") for _ in range(PROBE_EVERY_STEPS)]
    assert set(num_rows[8:]) <= {0, 20}


def test_few_decodes_never_rest() -> None:
    bench = flooded(Bench, LEAST_TURNS, token_s=1000.0, least=LEAST_TURNS)
    assert all(rows_of(bench.step()[0], "flood") == LEAST_TURNS for _ in range(PROBE_EVERY_STEPS))


def test_all_decode_again_when_the_light_tenant_has_left() -> None:
    bench = flooded(Bench, 40, token_s=4.0)
    bench.step()
    bench.scheduler.abort(bench.sequences[-1].key)
    for _ in range(3):
        plan, _ = bench.step()
    assert rows_of(plan, "flood") == 40


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(2, 40), st.floats(1.0, 60.0))
def test_decodes_that_rested_longest_are_next(num_flood: int, token_s: float) -> None:
    """Between two turns of a decode each other one has one, and a step may measure."""
    bench = flooded(Bench, num_flood, token_s)
    for _ in range(4):
        bench.step()
    last = dict.fromkeys(bench.sequences[:num_flood], 0)
    least = max(1, int((MOST_SLOWDOWN - 1) * (FIXED_S + token_s) / token_s))
    for step in range(1, PROBE_EVERY_STEPS - 8):
        plan, _ = bench.step()
        for row in plan.rows:
            if row.sequence in last:
                last[row.sequence] = step
        assert step - min(last.values()) <= ceil(num_flood / least) + 1
