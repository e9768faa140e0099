"""What steps and pushes cost on this machine: measured at start with a few forwards, then learned from each step.

At start, chunks of different lengths behind contexts of different lengths separate the three parts of the cost model: a
fixed cost per step, a cost per token, and a cost per pair of a token and a token that it attends to. Without this
measurement, dynamic chunk sizes start from the proportions of another model and adapt slowly to the measured steps.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import StepPlan, work_of
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.step_cost import CalibratedCost, CostSample, fit, pairs
from kvrelay.step.batch import WorkerBatch, WorkerRow

log = logging.getLogger(__name__)

LEAST_CHUNK_TOKENS = 16
LEAST_CHUNKED_STEPS = 2
"""A step cost is reported only after this many steps had a chunk of at least that length. Decodes alone cannot separate
its parts."""

LEAST_STEPS = 16
"""After which the cost of a step is known well enough to tell that one hangs."""
REPEATS = 2
CONTEXT_BUDGETS = 4
_KEY = ("calibration", 0, 0)


def calibrate(scheduler: Scheduler, runner: ModelRunner, token_budget: int) -> None:
    """Measures step costs and calibrates the scheduler. Takes seconds and blocks the thread. Call it before anything
    uses the pool: it writes into the pool's blocks."""
    getattr(runner, "wait_for_pages", lambda: None)()
    started = time.monotonic()
    cost = fit(measure_costs(runner, token_budget))
    scheduler.calibrate(cost)
    log.info(
        "calibrated in %.1f s: a step takes %.2f ms, %.4f more a token, %.2f more a million pairs that attend",
        time.monotonic() - started,
        1e3 * cost.fixed_s,
        1e3 * cost.token_s,
        1e9 * cost.pair_s,
    )


def measure_costs(runner: ModelRunner, token_budget: int) -> list[CostSample]:
    """Measures chunks of 1 token, a quarter of the token budget and the whole budget. Each runs behind no context, a
    short one and a long one: up to `CONTEXT_BUDGETS` token budgets, if the model and the pool allow.

    Each chunk runs `REPEATS` times and the shortest time counts, because a disturbance only makes a run longer.
    """
    spec = runner.spec
    longest = min(spec.max_model_len, spec.num_blocks * spec.block_size)
    budget = min(token_budget, longest)
    num_chunks = min(CONTEXT_BUDGETS + 1, longest // budget)
    last = (num_chunks - 1) * budget
    samples = []
    runner.add_sequence(_KEY, Sampling(temperature=0.0, max_tokens=1), [0], 1)
    try:
        for number in range(num_chunks):  # one more for the contexts' K/V, and one to warm up
            runner.execute(_batch(number * budget, budget, spec.block_size))
        for position in sorted({0, last // 2, last}):
            for num_tokens in sorted({1, max(1, budget // 4), budget}):
                batch = _batch(position, num_tokens, spec.block_size)
                seconds = min(runner.execute(batch).forward_s for _ in range(REPEATS))
                samples.append(CostSample(num_tokens, pairs(position, num_tokens), seconds))
    finally:
        runner.drop_sequence(_KEY)
    return samples


def _batch(position: int, num_tokens: int, block_size: int) -> WorkerBatch:
    row = WorkerRow(
        key=_KEY,
        token_ids=np.ones(num_tokens, np.int32),
        position=position,
        block_ids=np.arange(blocks_for(position + num_tokens, block_size), dtype=np.int32),
        sample=True,
        is_prefill=True,
    )
    return WorkerBatch(0, [row])


class SpeedMeter:
    """Learns what steps cost and how fast blocks are pushed."""

    def __init__(self) -> None:
        self._cost = CalibratedCost()
        self._num_chunked = self._num_stepped = 0
        self._pushed_bytes = 0.0
        self._push_busy_s = 0.0
        self._transfer_bytes_s: float | None = None

    def stepped(self, plan: StepPlan, forward_s: float) -> None:
        """Takes the measured seconds of a step."""
        self._cost.observe(*work_of(plan.rows), forward_s)
        self._num_stepped += 1
        self._num_chunked += any(row.num_tokens >= LEAST_CHUNK_TOKENS for row in plan.rows)

    def expected_s(self, plan: StepPlan) -> float:
        """Seconds that the step will take. 0 while too few were measured."""
        if self._num_stepped < LEAST_STEPS:
            return 0.0
        return self._cost.current.step_s(*work_of(plan.rows))

    def pushed(self, total_bytes: float, total_busy_s: float) -> None:
        """Takes totals since the start. The rate averages the time since the last call that had progress."""
        num_bytes, busy_s = total_bytes - self._pushed_bytes, total_busy_s - self._push_busy_s
        if num_bytes > 0 and busy_s > 0:
            rate = num_bytes / busy_s
            old = self._transfer_bytes_s
            self._transfer_bytes_s = rate if old is None else (old + rate) / 2
            self._pushed_bytes, self._push_busy_s = total_bytes, total_busy_s

    @property
    def step_cost(self) -> tuple[float, float, float] | None:
        """Seconds per step, per token, and per pair of a token and what it attends to. None until measured."""
        if self._num_chunked < LEAST_CHUNKED_STEPS:
            return None
        cost = self._cost.current
        return cost.fixed_s, cost.token_s, cost.pair_s

    @property
    def transfer_bytes_s(self) -> float | None:
        """Bytes per second while any push was in flight. None before the first push."""
        return self._transfer_bytes_s
