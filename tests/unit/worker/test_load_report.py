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
from kvrelay.worker.speeds import LINK_FORGOTTEN_S, LINK_HALF_LIFE_S, LinkSpeeds, PushClock, SpeedMeter, measure_costs
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
    plain, named = report_load(scheduler, SpeedMeter(), 0.0)
    assert (plain.queued_tokens, plain.own_queued_tokens, plain.num_sequences) == (150, 0, 2)
    assert (named[A].queued_tokens, named[A].own_queued_tokens, named[A].own_sequences) == (150, 100, 1)
    assert named[B].own_queued_pairs == pytest.approx(50 * 25)
    assert plain.step_cost is None and plain.transfer_bytes_s is None and not plain.slow_links


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
    clock = PushClock()
    clock.started(4, 1.0)
    clock.started(4, 1.5)
    clock.ended(4, 2.0)
    assert clock.busy_s(2.5) == pytest.approx(1.5)
    clock.ended(4, 3.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)
    clock.ended(1, 9.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)


# -- links -----------------------------------------------------------------------------------------------------------


def push(links: LinkSpeeds, worker_id: str, num_bytes: float, start: float, end: float) -> None:
    links.started(worker_id, 4, start)
    links.ended(worker_id, 2, num_bytes / 2, (start + end) / 2)
    links.ended(worker_id, 2, num_bytes / 2, end)


def test_each_link_has_its_rate_and_a_large_push_outweighs_small_ones() -> None:
    links = LinkSpeeds()
    assert links.rates(0.0) == {}
    push(links, "near", 1e9, 0.0, 1.0)
    push(links, "far", 1e7, 0.0, 1.0)
    for number in range(10):  # whose time is latency
        push(links, "near", 1e4, 1.0 + 0.002 * number, 1.001 + 0.002 * number)
    rates = links.rates(1.02)
    assert rates["near"] == pytest.approx(1e9, rel=0.02) and rates["far"] == pytest.approx(1e7, rel=0.02)


def test_a_push_that_fails_is_time_without_bytes_and_a_link_without_bytes_has_no_rate() -> None:
    links = LinkSpeeds()
    links.started("d", 4, 0.0)
    links.ended("d", 4, 0, 3.0)
    assert links.rates(3.0) == {}
    push(links, "d", 1e9, 3.0, 4.0)
    assert links.rates(4.0)["d"] == pytest.approx(1e9 / 4, rel=0.05)


def test_the_rate_of_an_unused_link_grows_until_it_is_used_and_one_push_tells() -> None:
    links = LinkSpeeds()
    push(links, "d", 1e7, 0.0, 1.0)
    assert links.rates(1.0 + 5 * LINK_HALF_LIFE_S)["d"] == pytest.approx(32e7, rel=0.02)
    at = 1.0 + 10 * LINK_HALF_LIFE_S
    push(links, "d", 1e9, at, at + 1.0)  # it has recovered
    assert links.rates(at + 1.0)["d"] == pytest.approx(1e9, rel=0.02)
    later = at + 10 * LINK_HALF_LIFE_S
    push(links, "d", 1e7, later, later + 1.0)
    assert links.rates(later + 1.0)["d"] == pytest.approx(1e7, rel=0.2)
    assert links.rates(later + 2 * LINK_FORGOTTEN_S) == {}


def test_slow_links_are_reported_beside_the_typical_rate_and_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = SpeedMeter(kv_bytes_per_token=1000.0)
    for length in (100, 400, 50, 200) * 20:
        meter.stepped(step(length), 0.002 + 1e-5 * length)  # so 100 MB/s of KV are computed
    assert meter.transfer_rates(0.0) == (None, {})
    for name, rate in {"d0": 2e9, "d1": 1e9, "d2": 1e7}.items():
        push(meter.links, name, 10 * rate, 0.0, 10.0)
    for _ in range(2):
        typical, slow = meter.transfer_rates(10.0)
        assert typical == pytest.approx(1e9) and slow == {"d2": pytest.approx(1e7)}
    assert len(caplog.records) == 1
    assert "d2 at 10 MB/s" in caplog.text and "computed at up to 95.9 MB/s" in caplog.text


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
