"""Drafts end while many sequences share the steps, and come back when they are gone; the outputs are the same."""

from __future__ import annotations

import pytest

from kvrelay.protocol.sampling import SpeculationMethod
from kvrelay.scheduling.plan import PlannedRow, work_of
from kvrelay.scheduling.scheduler_settings import SchedulerSettings, SpeculationSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_cost import StepCost
from kvrelay.step.batch import RowResult, StepResult
from tests.unit.scheduling.bench import Bench

pytestmark = pytest.mark.unit
COST = StepCost(fixed_s=1e-3, token_s=1e-4, pair_s=0.0)
PERIOD = 40
NUM_OTHERS = 48


def next_token(token: int) -> int:
    """A text that repeats."""
    return token % PERIOD + 1


class Repeating:
    """A model that goes on with that text, on a device whose steps take what `COST` says."""

    def __init__(self, method: SpeculationMethod) -> None:
        settings = SchedulerSettings(speculation=SpeculationSettings(method))
        self.bench = Bench(4000, token_budget=256, max_running=NUM_OTHERS + 1, settings=settings, cache=False)
        self.bench.scheduler.calibrate(COST)

    def add(self, num_prompt: int, max_tokens: int) -> Sequence:
        return self.bench.add([1 + at % PERIOD for at in range(num_prompt)], max_tokens)

    def step(self) -> int:
        """Returns the number of drafts."""
        plan = self.bench.scheduler.schedule()
        num_tokens, num_pairs = work_of(plan.rows)
        rows = [RowResult(sampled(row) if row.sample else ()) for row in plan.rows]
        self.bench.scheduler.commit(plan, StepResult(plan.step, rows, COST.step_s(num_tokens, num_pairs)))
        self.bench.pool.check_integrity()
        return sum(len(row.guesses) for row in plan.rows if row.guesses is not None)


def sampled(row: PlannedRow) -> tuple[int, ...]:
    """The accepted drafts and the token behind them."""
    end = row.position + row.num_tokens
    found = [next_token(int(row.sequence.tokens.view(end - 1, end)[0]))]
    for draft in () if row.guesses is None else row.guesses.tolist():
        if draft != found[-1]:
            break
        found.append(next_token(draft))
    return tuple(found)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_end_under_load_and_come_back(method: SpeculationMethod) -> None:
    model = Repeating(method)
    first = model.add(2 * PERIOD, 100 * PERIOD)
    alone = [model.step() for _ in range(6)]
    assert alone[-1] > 0, "text that repeats has drafts"
    others = [model.add(4, 2 * PERIOD) for _ in range(NUM_OTHERS)]
    while any(not other.num_output for other in others):
        model.step()
    num_loaded = 0
    while len(model.bench.scheduler.running) == 1 + NUM_OTHERS:
        assert model.step() == 0, "each token costs its time in a step of so many sequences"
        num_loaded += 1
    assert num_loaded > PERIOD
    while len(model.bench.scheduler.running) > 1:
        model.step()
    later: list[int] = []
    while not any(later) and model.bench.scheduler.has_work:
        later.append(model.step())
    assert any(later), "drafts come back when the others are gone"
    while model.bench.scheduler.has_work:
        model.step()
    for sequence in (first, *others):
        tokens = sequence.tokens.view(0, sequence.num_tokens).tolist()
        assert tokens == [1 + at % PERIOD for at in range(len(tokens))]
        assert sequence.num_output == sequence.sampling.max_tokens
