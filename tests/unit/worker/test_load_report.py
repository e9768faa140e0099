"""What workers measure of themselves, and whose share of their load is whose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvrelay.engine.make import make_runner
from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.chunk_sizes import DynamicChunks
from kvrelay.scheduling.plan import PlannedRow, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer
from kvrelay.scheduling.step_cost import StepCost, fit, pairs
from kvrelay.step.batch import StepResult, WorkerBatch
from kvrelay.worker.reports import report_load
from kvrelay.worker.speeds import SpeedMeter, measure_costs
from kvrelay_prefill.outgoing_handoffs import PushClock
from tests.fakes.hash_runner import HashRunner
from tests.tiny_models import build_model
from tests.unit.scheduling.bench import Bench

A, B = (PeerRef(name, "1", f"tcp://{name}") for name in "ab")


def sequence(name: str, num_tokens: int, router: PeerRef = A) -> Sequence:
    return Sequence(
        key=(name, 1, 0),
        tokens=TokenBuffer(np.full(num_tokens, hash(name) % 1000, np.int32)),
        num_prompt=num_tokens,
        sampling=Sampling(max_tokens=8),
        root=root_hash(model="m"),
        table=BlockTable(16),
        origin=Origin(router),
    )


def step(*lengths: int) -> StepPlan:
    return StepPlan(1, [PlannedRow(sequence("s", 1), 100, length, length > 1, True) for length in lengths])


def test_a_report_has_everybodys_backlog_and_the_readers_share() -> None:
    pool = BlockPool(64, 16)
    limits = SchedulerLimits(32, 8, 512, frozenset())
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())
    scheduler.add(sequence("x", 100))
    scheduler.add(sequence("y", 50, B))
    plain, named = report_load(scheduler, SpeedMeter())
    assert (plain.queued_tokens, plain.own_queued_tokens, plain.num_sequences) == (150, 0, 2)
    assert (named[A].queued_tokens, named[A].own_queued_tokens, named[A].own_sequences) == (150, 100, 1)
    assert named[B].own_queued_pairs == pytest.approx(50 * 25)
    assert plain.step_cost is None and plain.transfer_bytes_s is None


def test_the_cost_of_prompts_is_known_after_prompts_not_after_decodes() -> None:
    meter = SpeedMeter()
    for _ in range(50):
        meter.stepped(step(1, 1, 1), 0.0023)
    assert meter.step_cost is None
    for length in (100, 400, 50, 200) * 20:
        meter.stepped(step(length), 0.002 + 1e-4 * length)
    assert meter.step_cost is not None
    fixed_s, token_s, pair_s = meter.step_cost
    assert fixed_s + token_s * 300 + pair_s * 300 * 250 == pytest.approx(0.032, rel=0.15)


def test_pushes_that_overlap_are_one_busy_time() -> None:
    clock, meter = PushClock(), SpeedMeter()
    clock.started(4, 1.0)
    clock.started(4, 1.5)
    clock.ended(4, 2.0)
    assert clock.busy_s(2.5) == pytest.approx(1.5)
    clock.ended(4, 3.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)
    clock.ended(1, 9.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)
    meter.pushed(0, 0.0)
    assert meter.transfer_bytes_s is None
    meter.pushed(1000, 2.0)
    assert meter.transfer_bytes_s == pytest.approx(500)


# -- calibration finds what steps cost -------------------------------------------------------------------------------


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
