"""What a step costs on this machine, measured at the start by a few forwards.

Chunks of different lengths behind contexts of different lengths tell the three parts of the cost model apart: a step, a
token, and a pair of a token and what it attends to. Without it, dynamic chunks start from the proportions of a model
that is not this one, and follow the measured steps only by and by.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from kvrelay.engine.batch import ModelRunner, WorkerBatch, WorkerRow
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.step_cost import CostSample, fit, pairs

log = logging.getLogger(__name__)

REPEATS = 2
CONTEXT_BUDGETS = 4
_KEY = ("calibration", 0, 0)


def calibrate(scheduler: Scheduler, runner: ModelRunner, token_budget: int) -> None:
    """Measures what steps cost here, before anything uses the pool. Seconds long, and blocks."""
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
    """Runs chunks of 1 token, of a quarter of the budget and of all of it, behind no context, a short and a long one:
    up to `CONTEXT_BUDGETS` budgets, as far as the model and the pool go.

    Each is run `REPEATS` times and the shortest counts: whatever disturbs a run makes it longer. The pool's blocks are
    written to, so this is for the time before it is used.
    """
    spec = runner.spec
    longest = min(spec.max_model_len, spec.num_blocks * spec.block_size)
    budget = min(token_budget, longest)
    num_chunks = min(CONTEXT_BUDGETS + 1, longest // budget)
    last = (num_chunks - 1) * budget
    samples = []
    runner.add_sequence(_KEY, Sampling(temperature=0.0, max_tokens=1), [0], 1)
    try:
        for number in range(num_chunks):  # the contexts' K/V; and a warm-up
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
