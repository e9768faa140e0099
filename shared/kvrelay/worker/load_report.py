"""A worker's load and speed as routers see them: queued prompts by router, measured costs of steps and pushes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.protocol.messages import LoadReport, PeerRef
from kvrelay.scheduling.plan import StepPlan, work_of
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_cost import CalibratedCost, pairs

LEAST_CHUNK_TOKENS = 16
LEAST_CHUNKED_STEPS = 2
"""A step cost is reported only after this many steps had a chunk of at least that length. Decodes alone cannot separate
its parts."""


class SpeedMeter:
    """Learns what steps cost and how fast blocks are pushed."""

    def __init__(self) -> None:
        self._cost = CalibratedCost()
        self._num_chunked = 0
        self._pushed_bytes = 0.0
        self._push_busy_s = 0.0
        self._transfer_bytes_s: float | None = None

    def stepped(self, plan: StepPlan, forward_s: float) -> None:
        """Takes the measured seconds of a step."""
        self._cost.observe(*work_of(plan.rows), forward_s)
        self._num_chunked += any(row.num_tokens >= LEAST_CHUNK_TOKENS for row in plan.rows)

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


class PushClock:
    """Measures the time with at least one push in flight, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._num_open = 0
        self._since = 0.0
        self._busy_s = 0.0

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


def report_load(scheduler: Scheduler, speeds: SpeedMeter) -> tuple[LoadReport, dict[PeerRef, LoadReport]]:
    """Returns the report for a router without requests here, and for each other router its own report, which names its
    share.

    O(sequences here).
    """
    total = _Sum()
    by_router: dict[PeerRef, _Sum] = {}
    for sequence, num_uncached in _backlog(scheduler):
        num_pairs = pairs(sequence.num_tokens - num_uncached, num_uncached) if num_uncached > 1 else 0.0
        for each in (total, by_router.setdefault(sequence.origin.router, _Sum())):
            each.add(sequence, num_uncached, num_pairs)
    plain = LoadReport(
        queued_tokens=total.num_tokens,
        queued_pairs=total.num_pairs,
        num_sequences=total.num_sequences,
        context_tokens=total.context_tokens,
        step_cost=speeds.step_cost,
        transfer_bytes_s=speeds.transfer_bytes_s,
    )
    named = {
        router: msgspec.structs.replace(
            plain,
            own_queued_tokens=own.num_tokens,
            own_queued_pairs=own.num_pairs,
            own_sequences=own.num_sequences,
        )
        for router, own in by_router.items()
    }
    return plain, named


class _Sum:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_pairs = 0.0
        self.num_sequences = 0
        self.context_tokens = 0

    def add(self, sequence: Sequence, num_uncached: int, num_pairs: float) -> None:
        self.num_tokens += num_uncached
        self.num_pairs += num_pairs
        self.num_sequences += 1
        if not num_uncached:
            self.context_tokens += sequence.num_tokens


def _backlog(scheduler: Scheduler) -> Iterable[tuple[Sequence, int]]:
    """Yields every sequence with the prompt tokens that still have to be computed for it."""
    size = scheduler.blocks.pool.block_size
    for sequence in scheduler.waiting:
        if sequence.remote is not None:
            continue  # its prompt is computed elsewhere
        yield sequence, sequence.num_tokens - size * scheduler.blocks.num_cached_blocks(sequence)
    for sequence in scheduler.running.values():
        yield sequence, sequence.num_remaining if sequence.is_prompting else 0
