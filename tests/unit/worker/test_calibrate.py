"""Calibration finds what steps cost, and chunks of a long prompt then take equal time from the first one on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvrelay.engine.make import make_runner
from kvrelay.scheduling.chunk_sizes import DynamicChunks
from kvrelay.scheduling.plan import worker_batch
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.step_cost import StepCost, fit, pairs
from kvrelay.step.batch import StepResult, WorkerBatch
from kvrelay.worker.calibrate import measure_costs
from tests.fakes.hash_runner import HashRunner
from tests.tiny_models import build_model
from tests.unit.scheduling.bench import Bench

pytestmark = pytest.mark.unit
BUDGET = 64


class CostlyRunner(HashRunner):
    """Says that its steps take what `cost` says."""

    def __init__(self, cost: StepCost, num_blocks: int, block_size: int = 8) -> None:
        super().__init__(num_blocks, block_size, num_blocks * block_size)
        self.cost = cost

    def execute(self, batch: WorkerBatch) -> StepResult:
        num_pairs = sum(pairs(row.position, len(row.token_ids)) for row in batch.rows)
        return replace(super().execute(batch), forward_s=self.cost.step_s(batch.num_tokens, num_pairs))


COSTS = [StepCost(1e-3, 1e-4, 2e-7), StepCost(0.0, 1e-4, 3e-7), StepCost(2e-3, 5e-5, 1e-7), StepCost(1e-3, 1e-3, 0.0)]


@pytest.mark.parametrize("cost", COSTS, ids=repr)
def test_chunks_of_a_long_prompt_take_nearly_equal_time_from_the_first_on(cost: StepCost) -> None:
    bench = Bench(num_blocks=256, token_budget=BUDGET, settings=SchedulerSettings(chunking="dynamic"), cache=False)
    runner = CostlyRunner(cost, 256, 4)
    bench.scheduler.calibrate(fit(measure_costs(runner, BUDGET)))
    prompt = bench.add([1] * 1000, 1)
    runner.add_sequence(prompt.key, prompt.sampling, [], 0)
    times, lengths = [], []
    while bench.scheduler.has_work:
        plan = bench.scheduler.schedule()
        result = runner.execute(worker_batch(plan))
        bench.scheduler.commit(plan, result)
        times.append(result.forward_s)
        lengths.append(plan.num_prefill_tokens)
    assert max(times[:-1]) / min(times[:-1]) < 1.15, list(zip(lengths, times, strict=True))
    assert lengths[0] == max(lengths) >= 0.9 * BUDGET


def test_without_calibration_the_first_chunks_differ() -> None:
    """So that the test above can fail."""
    cost = StepCost(0.0, 1e-4, 5e-6)
    guessed, fitted = DynamicChunks(BUDGET), DynamicChunks(BUDGET)
    fitted.calibrate(fit(measure_costs(CostlyRunner(cost, 256), BUDGET)))
    target = cost.step_s(BUDGET, pairs(0, BUDGET))
    for chunks, is_right in ((guessed, False), (fitted, True)):
        num_tokens = chunks.cost.current.tokens_within(
            chunks.cost.current.step_s(BUDGET, pairs(0, BUDGET)) - chunks.cost.current.fixed_s, 900
        )
        took = cost.step_s(num_tokens, pairs(900, num_tokens))
        assert (took < 1.1 * target) is is_right


@pytest.mark.parametrize(("num_blocks", "budget"), [(1, 512), (3, 16), (200, 64)])
def test_it_fits_any_pool_and_leaves_no_sequence_behind(num_blocks: int, budget: int) -> None:
    runner = CostlyRunner(COSTS[0], num_blocks)
    samples = measure_costs(runner, budget)
    assert samples and all(sample.seconds > 0 for sample in samples)
    assert runner.num_sequences == 0


def test_the_real_runner_tells_a_model_that_predicts_its_steps_in_order(tmp_path: Path) -> None:
    runner = make_runner(str(build_model("qwen3", tmp_path)), dtype="float32", block_size=16, num_blocks=64)
    samples = measure_costs(runner, 128)
    cost = fit(samples)
    assert cost.token_s > 0 and min(cost.fixed_s, cost.pair_s) >= 0
    predicted = [cost.step_s(sample.num_tokens, sample.num_pairs) for sample in samples]
    assert np.all(np.isfinite(predicted))
    assert cost.step_s(128, pairs(0, 128)) > cost.step_s(1, 1)
