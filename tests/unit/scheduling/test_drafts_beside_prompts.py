"""What drafts leave to prompts and samples: tokens of a step, and reserved blocks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.scheduler_settings import SpeculationSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.speculator import Speculator
from kvrelay.scheduling.step_planner import GUESSES_PART
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench

pytestmark = pytest.mark.unit
BUDGET = 32


class AsManyAsFit(Speculator):
    """Drafts whatever there is room for, once it may; all are rejected."""

    may_draft = False

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        return np.full(most, 9, np.int32) if most > 0 and self.may_draft else None


def drafting_bench(num_blocks: int, max_tokens: int) -> tuple[Bench, AsManyAsFit]:
    """A sequence decodes."""
    bench, speculator = Bench(num_blocks, token_budget=BUDGET), AsManyAsFit(SpeculationSettings("ngram"))
    bench.scheduler.lifecycle.speculator = speculator
    bench.add([1, 2, 3], max_tokens)
    step(bench)
    return bench, speculator


def step(bench: Bench) -> StepPlan:
    plan = bench.scheduler.schedule()
    bench.scheduler.commit(plan, bench.forward(plan))
    bench.pool.check_integrity()
    return plan


def num_drafts(plan: StepPlan) -> int:
    return sum(len(row.guesses) for row in plan.rows if row.guesses is not None)


def test_a_prompt_does_not_wait_for_the_end_of_drafts() -> None:
    bench, speculator = drafting_bench(64, 100)
    speculator.may_draft = True
    alone = step(bench)
    assert num_drafts(alone) == BUDGET - 1
    bench.add([7] * 100, 4)
    plans = [step(bench) for _ in range(5)]
    assert sum(plan.num_prefill_tokens for plan in plans) == 100
    assert max(num_drafts(plan) for plan in plans if plan.num_prefill_tokens) == BUDGET // GUESSES_PART
    assert all(num_drafts(plan) for plan in plans)


@pytest.mark.parametrize("num_blocks", range(26, 30))
def test_drafts_leave_blocks_that_are_reserved_for_samples(num_blocks: int) -> None:
    bench, speculator = drafting_bench(num_blocks, 70)
    samples = [bench.add([7] * (20 * BLOCK_SIZE + 2), 2, sample=("g", index, 4)) for index in range(4)]
    has_reserved = False
    while any(not sample.num_output for sample in samples):
        plan = step(bench)
        speculator.may_draft = True
        assert not plan.preempted and plan.rows
        num_reserved = bench.scheduler.lifecycle.num_reserved_blocks
        assert bench.pool.num_available >= num_reserved
        has_reserved = has_reserved or num_reserved > 0
    assert has_reserved
