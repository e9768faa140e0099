"""Schedule, run, commit, publish; again. Policy and bookkeeping stay on the event loop's thread, the forward does not.

While a forward runs on its thread, the event loop goes on with messages, cancels and transfers. State of the scheduler
is touched on the event loop's thread only, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvrelay.engine.batch import ModelRunner, RowsFailed, SequenceKey, StepResult, WorkerBatch, WorkerRow
from kvrelay.scheduling.base import Scheduler
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.metrics_store import MetricsStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepTotals:
    """Sums since the start; seconds are of the wall clock."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_failed_steps: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCallbacks:
    """What the service does around a step, all on the event loop's thread."""

    planned: Callable[[StepPlan], None]
    committed: Callable[[list[SequenceOutput]], None]
    failed: Callable[[list[Sequence], str], None]


def worker_batch(plan: StepPlan) -> WorkerBatch:
    """The second stage: only what a forward needs, as views of the sequences' arrays."""
    rows = [
        WorkerRow(
            key=row.sequence.key,
            token_ids=row.sequence.tokens.view(row.position, row.position + row.num_tokens),
            position=row.position,
            block_ids=row.sequence.table.ids,
            sample=row.sample,
            is_prefill=row.is_prefill,
        )
        for row in plan.rows
    ]
    swaps = plan.swaps
    if swaps is None:
        return WorkerBatch(plan.step, rows)
    return WorkerBatch(plan.step, rows, swaps.out, swaps.back)


class StepLoop:
    """Drives a scheduler and a runner until stopped; sleeps on an event while there is nothing to do."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, metrics: MetricsStore | None = None) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.totals = StepTotals()
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._wake = asyncio.Event()
        self._in_flight = False
        self._stopping = False
        self._forget: list[SequenceKey] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError when its key is known, or the sampler cannot take its parameters."""
        self._introduce(sequence)
        self.scheduler.add(sequence)
        if self._metrics is not None:
            self._metrics.arrived(sequence, is_running=False)

    def adopt(self, sequence: Sequence) -> None:
        """Takes over a sequence whose prompt is computed. Raises as `add` does."""
        self._introduce(sequence)
        self.scheduler.adopt(sequence)
        if self._metrics is not None:
            self._metrics.arrived(sequence, is_running=True)

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence; it is in no step after the one in flight."""
        self.scheduler.abort(key)
        self.forget(key)
        self.wake()

    def forget(self, key: SequenceKey) -> None:
        """Drops the sampler's state of a sequence that left, once no step in flight uses it."""
        if self._metrics is not None:
            self._metrics.left(key)
        if self._in_flight:
            self._forget.append(key)
        else:
            self.runner.drop_sequence(key)

    def wake(self) -> None:
        """Something changed that may allow a step."""
        self._wake.set()

    def stop(self) -> None:
        """Ends `run` after the step in flight."""
        self._stopping = True
        self.wake()

    async def run(self, callbacks: StepCallbacks) -> None:
        """The loop itself."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            self._wake.clear()
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            batch = worker_batch(plan)
            schedule_s = time.perf_counter() - started
            self.totals.schedule_s += schedule_s
            if self._metrics is not None:
                self._metrics.planned(plan)
            self._in_flight = plan.has_work
            callbacks.planned(plan)
            if not plan.has_work:
                if not plan.preempted:  # else what they held is free now, and nobody else would say so
                    await self._wake.wait()
                continue
            try:
                result = await loop.run_in_executor(self._executor, self.runner.execute, batch)
            except Exception as error:
                log.exception("step %d failed", plan.step)
                keys = error.keys if isinstance(error, RowsFailed) else None
                callbacks.failed(self._fail(plan, keys), f"{type(error).__name__}: {error}")
            else:
                callbacks.committed(self._commit(plan, result, schedule_s))
        self._executor.shutdown(wait=True)
        if self._metrics is not None:
            self._metrics.close()

    def _introduce(self, sequence: Sequence) -> None:
        tokens = sequence.tokens.view(0, sequence.num_tokens)
        self.runner.add_sequence(sequence.key, sequence.sampling, tokens.tolist(), sequence.num_prompt)
        self.wake()

    def _commit(self, plan: StepPlan, result: StepResult, schedule_s: float) -> list[SequenceOutput]:
        started = time.perf_counter()
        outputs = self.scheduler.commit(plan, result)
        self._landed()
        self.totals.num_steps += 1
        self.totals.num_prefill_tokens += plan.num_prefill_tokens
        self.totals.num_decode_tokens += plan.num_decode_tokens
        self.totals.forward_s += result.forward_s
        commit_s = time.perf_counter() - started
        self.totals.commit_s += commit_s
        if self._metrics is not None:
            self._metrics.committed(plan, result, outputs, self.scheduler, schedule_s, commit_s)
        for output in outputs:
            if output.finish is not None:
                self.forget(output.sequence.key)
        return outputs

    def _fail(self, plan: StepPlan, keys: frozenset[SequenceKey] | None) -> list[Sequence]:
        failed = self.scheduler.fail_step(plan, keys)
        self._landed()
        self.totals.num_failed_steps += 1
        for sequence in failed:
            self.forget(sequence.key)
        return failed

    def _landed(self) -> None:
        self._in_flight = False
        for key in self._forget:
            self.runner.drop_sequence(key)
        self._forget.clear()
