"""What steps and pushes cost on this machine: measured at start with a few forwards, then learned from each step.

At start, chunks of different lengths behind contexts of different lengths separate the three parts of the cost model: a
fixed cost per step, a cost per token, and a cost per pair of a token and a token that it attends to. Without this
measurement, dynamic chunk sizes start from the proportions of another model and adapt slowly to the measured steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from statistics import median_high

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
LINK_HALF_LIFE_S = 60.0
"""After this time a push counts half, and the rate of a link without pushes is taken to be twice as high."""
LINK_FORGOTTEN_S = 1800.0
LEAST_LINK_BYTES = 64 << 20
"""A link is called slow after so many bytes. Small pushes are slow by their latency, over any link."""
SLOW_SHARE = 0.5
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


class PushClock:
    """Measures the time with at least one push in flight, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._num_open = 0
        self._since = 0.0
        self._busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._num_open

    def started(self, num_blocks: int, now: float) -> None:
        """Called when `num_blocks` blocks were submitted to the transport."""
        if not self._num_open:
            self._since = now
        self._num_open += num_blocks

    def ended(self, num_blocks: int, now: float) -> None:
        """Called when `num_blocks` blocks arrived or failed."""
        if self._num_open and self._num_open <= num_blocks:
            self._busy_s += now - self._since
        self._num_open = max(0, self._num_open - num_blocks)

    def busy_s(self, now: float) -> float:
        return self._busy_s + (now - self._since if self._num_open else 0.0)


@dataclass(slots=True, eq=False)
class _Link:
    clock: PushClock = field(default_factory=PushClock)
    counted_s: float = 0.0  # of the clock's time
    used_at: float = 0.0
    num_bytes: float = 0.0  # this and the next: sums, halved every `LINK_HALF_LIFE_S`
    busy_s: float = 0.0

    def rate(self, now: float) -> float:
        unused_s = max(0.0, now - self.used_at) if self.clock.is_idle else 0.0
        return self.num_bytes / self.busy_s * 2 ** (unused_s / LINK_HALF_LIFE_S)


class LinkSpeeds:
    """The bytes per second at which blocks reach each decode worker, while any of its pushes is in flight.

    Large pushes outweigh small ones, whose time is latency. Routers avoid a slow link, and then nothing measures it, so
    the rate of an unused link is taken to grow, until a prompt is handed over there again.
    """

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def started(self, worker_id: str, num_blocks: int, now: float) -> None:
        """A push of so many blocks to this decode worker was submitted."""
        link = self._links.setdefault(worker_id, _Link(used_at=now))
        link.clock.started(num_blocks, now)

    def ended(self, worker_id: str, num_blocks: int, num_bytes: float, now: float) -> None:
        """So many of its blocks arrived with `num_bytes`, or failed with 0."""
        if (link := self._links.get(worker_id)) is None:
            return
        link.clock.ended(num_blocks, now)
        total_s = link.clock.busy_s(now)
        counted_s, link.counted_s = link.counted_s, total_s
        self.pushed(worker_id, num_bytes, total_s - counted_s, now)

    def pushed(self, worker_id: str, num_bytes: float, busy_s: float, now: float) -> None:
        """Takes what was pushed to this decode worker since the last call, and the seconds for it."""
        link = self._links.setdefault(worker_id, _Link(used_at=now))
        weight = 0.5 ** ((now - link.used_at) / LINK_HALF_LIFE_S)
        link.num_bytes = link.num_bytes * weight + num_bytes
        link.busy_s = link.busy_s * weight + busy_s
        link.used_at = now

    def rates(self, now: float, least_bytes: float = 1.0) -> dict[str, float]:
        """By worker id, of links that had so many bytes lately."""
        for worker_id in [name for name, link in self._links.items() if now - link.used_at > LINK_FORGOTTEN_S]:
            del self._links[worker_id]
        known = {name: link for name, link in self._links.items() if link.num_bytes >= least_bytes and link.busy_s}
        return {name: link.rate(now) for name, link in known.items()}


class SpeedMeter:
    """Learns what steps cost and how fast blocks are pushed."""

    def __init__(self, kv_bytes_per_token: float = 0.0) -> None:
        self.links = LinkSpeeds()
        self._kv_bytes_per_token = kv_bytes_per_token
        self._cost = CalibratedCost()
        self._num_chunked = self._num_stepped = 0
        self._slow: set[str] = set()

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

    @property
    def step_cost(self) -> tuple[float, float, float] | None:
        """Seconds per step, per token, and per pair of a token and what it attends to. None until measured."""
        if self._num_chunked < LEAST_CHUNKED_STEPS:
            return None
        cost = self._cost.current
        return cost.fixed_s, cost.token_s, cost.pair_s

    def transfer_rates(self, now: float) -> tuple[float | None, dict[str, float]]:
        """Bytes per second of the typical link, or None before the first push, and of the decode workers that are
        reached at less than half of it. Warns once of a link that is slower than prompts are computed."""
        rates = self.links.rates(now)
        if not rates:
            return None, {}
        self._warn_of_slow(now)
        typical = median_high(rates.values())
        return typical, {name: rate for name, rate in rates.items() if rate < SLOW_SHARE * typical}

    def _warn_of_slow(self, now: float) -> None:
        if self.step_cost is None or not self.step_cost[1]:
            return  # how fast prompts are computed is not known
        computed_bytes_s = self._kv_bytes_per_token / self.step_cost[1]
        for worker_id, rate in self.links.rates(now, LEAST_LINK_BYTES).items():
            if worker_id not in self._slow and rate < computed_bytes_s:
                self._slow.add(worker_id)
                log.warning(
                    "KV blocks reach %s at %.3g MB/s, and prompts are computed at up to %.3g MB/s of KV: handoffs wait "
                    "for this link; where decode computes a prompt sooner, routers hand over nothing",
                    worker_id,
                    rate / 1e6,
                    computed_bytes_s / 1e6,
                )
