"""The loop of a worker: schedule, run, commit, publish. Scheduling and bookkeeping stay on the event loop's thread; the
forward runs elsewhere. Scheduler state is touched on the event loop's thread alone, so it needs no lock.

While a forward runs, the event loop handles messages, cancels and transfers. With overlap it also publishes the
previous step and plans the next one (as SGLang's overlapped scheduling does). On a device with a queue the next step is
also launched at once, so that the device goes from step to step without waiting for the host.

The states of a step: PLANNED ahead, LAUNCHED (behind the step in flight, or after that one has landed), LANDED,
COMMITTED. If a step fails, the step behind it is CANCELLED first: the loop waits until it has ended on the device,
because it may still write into its blocks, and drops its result. Only then is the failed step marked FAILED.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvrelay.awake_clock import AwakeClock
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import (
    Candidates,
    DeviceLost,
    GrammarWork,
    RowsFailed,
    StepResult,
    WorkerBatch,
    failure_kind,
)
from kvrelay.telemetry.metrics import SECONDS, TOKENS, Histogram
from kvrelay.telemetry.metrics_file import Mark, StepEventName
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.worker.launchers import Flight, MakeLauncher, ThreadLauncher
from kvrelay.worker.speeds import SpeedMeter

log = logging.getLogger(__name__)

HANGS_AFTER_S = 30.0
HANGS_AFTER_TIMES = 20.0
"""A step hangs that takes longer than both: the seconds, and so many times what is expected of it."""
UNMEASURED_HANGS_AFTER_S = 600.0
"""The same while no step was measured: the first ones may compile kernels."""
MAX_NAMED = 8
"""Requests that the line of a failed step names."""


@dataclass(slots=True)
class StepTotals:
    """Totals since the start. Seconds are wall-clock."""

    num_steps: int = 0
    num_steps_ahead: int = 0  # planned while the previous step was in flight
    num_steps_launched_ahead: int = 0  # also launched while the previous step was in flight
    num_captured_steps: int = 0  # replayed from a CUDA graph
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that joined the output
    num_failed_steps: int = 0
    num_mixed_steps: int = 0  # prompt chunks and decodes
    num_prefill_steps: int = 0  # prompt chunks only
    num_decode_steps: int = 0  # decodes only
    schedule_s: float = 0.0
    forward_s: float = 0.0
    commit_s: float = 0.0
    grammar_work: GrammarWork = field(default_factory=GrammarWork)
    durations: Histogram = field(default_factory=lambda: Histogram("s", SECONDS))  # forward times
    sizes: Histogram = field(default_factory=lambda: Histogram("{token}", TOKENS))

    @property
    def num_copy_steps(self) -> int:
        """Steps that computed nothing and only copied blocks."""
        return self.num_steps - self.num_mixed_steps - self.num_prefill_steps - self.num_decode_steps

    def add(self, plan: StepPlan, result: StepResult, *, ahead: bool, launched_ahead: bool = False) -> None:
        """Counts a finished step. A step without tokens only copied blocks."""
        num_prefill_tokens, num_decode_tokens = plan.num_prefill_tokens, plan.num_decode_tokens
        self.num_steps += 1
        self.num_steps_ahead += ahead
        self.num_steps_launched_ahead += launched_ahead
        self.num_captured_steps += result.captured
        self.num_prefill_tokens += num_prefill_tokens
        self.num_decode_tokens += num_decode_tokens
        self.num_mixed_steps += bool(num_prefill_tokens and num_decode_tokens)
        self.num_prefill_steps += bool(num_prefill_tokens and not num_decode_tokens)
        self.num_decode_steps += bool(num_decode_tokens and not num_prefill_tokens)
        self.forward_s += result.forward_s
        for row, given in zip(plan.rows, result.rows, strict=True) if plan.has_guesses else ():
            if row.guesses is not None:
                self.num_drafted_tokens += len(row.guesses)
                self.num_accepted_tokens += given.num_accepted
        if result.grammar_work is not None:
            self.grammar_work.add(result.grammar_work)
        self.durations.record(result.forward_s)
        self.sizes.record(num_prefill_tokens + num_decode_tokens)


@dataclass(frozen=True, slots=True)
class StepCallbacks:
    """The service's callbacks around a step. All run on the event loop's thread."""

    planned: Callable[[StepPlan], None]
    committed: Callable[[list[SequenceOutput]], None]
    failed: Callable[[list[Sequence], FailureKind, str], None]


@dataclass(slots=True)
class PlannedStep:
    """A planned step. `ahead`: it was planned while the previous one was in flight. `launched_ahead`: it was also
    launched then."""

    plan: StepPlan
    batch: WorkerBatch
    schedule_s: float
    ahead: bool
    flight: Flight | None = None
    launched_ahead: bool = False


class StepLoop:
    """Drives a scheduler and a runner until stopped. Sleeps on an event while there is nothing to do.

    With `overlap`, the planning of the next step and the commit and publishing of the previous one happen during a
    forward. A step that was planned ahead is launched as soon as the launcher allows, at the latest when the step in
    flight lands. Only then is that step committed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        observer: StepObserver | None = None,
        *,
        overlap: bool = True,
        make_launcher: MakeLauncher = ThreadLauncher,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.totals = StepTotals()
        self.overlap = overlap
        self.speeds = SpeedMeter(runner.spec.block_bytes / runner.spec.block_size)
        self._observer = observer
        self._trace = observer.file.trace if observer is not None and observer.file is not None else None
        self._launcher = make_launcher(runner, self._trace)
        self._wake = asyncio.Event()
        self._last_planned = 0
        self._last_landed = 0
        self._stopping = False
        self._open: deque[StepPlan] = deque()  # planned and not landed
        self._watched: StepPlan | None = None  # the one in flight when `hanging_step` was called last
        self._watched_since = 0.0
        self._clock = AwakeClock()
        # Ended sequences, each with the number of the last step that may have a row for it.
        self._forget: deque[tuple[int, SequenceKey]] = deque()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError if its key is known or the sampler cannot take its parameters."""
        self._introduce(sequence)
        with self._forget_if_refused(sequence.key):
            self.scheduler.add(sequence)
        if self._observer is not None:
            self._observer.arrived(sequence, is_running=False)

    def adopt(self, sequence: Sequence, candidates: Candidates | None = None) -> SequenceOutput | None:
        """Runs a handoff whose KV is here, as `Scheduler.adopt` does. Raises ValueError as `add` does."""
        self._introduce(sequence)
        with self._forget_if_refused(sequence.key):
            output = self.scheduler.adopt(sequence, candidates)
        if self._observer is not None:
            self._observer.arrived(sequence, is_running=True)
        if output is not None:
            self.forget(sequence.key)
        return output

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence. Steps that are already planned may still have a row for it."""
        self.scheduler.abort(key)
        self.forget(key)
        self.wake()

    def forget(self, key: SequenceKey) -> None:
        """Drops the sampler state of a sequence that left, once no planned step and no step in flight uses it."""
        if self._observer is not None:
            self._observer.left(key)
        if self._last_landed < self._last_planned:
            self._forget.append((self._last_planned, key))
        else:
            self.runner.drop_sequence(key)

    def wake(self) -> None:
        """Wakes the loop after a change that may allow a step."""
        self._wake.set()

    def stop(self) -> None:
        """Ends `run` after the step in flight. A step that was planned behind it is cancelled, launched or not."""
        self._stopping = True
        self.wake()

    def hanging_step(self, now: float) -> str:
        """Describes the step in flight if it takes so long that it will never end; else returns an empty string. Call
        it often: time during which the process was suspended does not count."""
        seconds = self._clock.read(now)
        if (first := next(iter(self._open), None)) is not self._watched:
            self._watched, self._watched_since = first, seconds
        elapsed_s = seconds - self._watched_since
        if first is None or elapsed_s < HANGS_AFTER_S:
            return ""
        expected_s = max(map(self.speeds.expected_s, self._open))
        limit_s = HANGS_AFTER_TIMES * expected_s if expected_s else UNMEASURED_HANGS_AFTER_S
        return f"step {first.step} has run for {elapsed_s:.0f} s" if elapsed_s > limit_s else ""

    async def run(self, callbacks: StepCallbacks) -> None:
        """Runs the loop until `stop`. Raises DeviceLost."""
        was_delayed = False
        while not self._stopping:
            self._wake.clear()
            step = self._plan(callbacks)
            if step.plan.has_work:
                await self._run_from(step, callbacks)
            elif step.plan.delayed:
                if (
                    was_delayed
                ):  # a delay that was decided while the previous step was in flight may be over: ask again first
                    await self._wait_for_the_gate()
            elif not step.plan.preempted:  # preempted sequences freed blocks, and no event would wake the loop
                self._launcher.rest()
                await self._wake.wait()
            was_delayed = step.plan.delayed and not step.plan.has_work
        self._launcher.close()
        if self._observer is not None:
            self._observer.close()

    async def _wait_for_the_gate(self) -> None:
        """Prompts are held back and there is nothing else to do. Waits for an event or the end of the longest delay."""
        gate = self.scheduler.admission.prefill_gate
        remaining_delay_s = math.inf if gate is None else gate.remaining_delay_s()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), None if math.isinf(remaining_delay_s) else remaining_delay_s)

    async def _run_from(self, first: PlannedStep, callbacks: StepCallbacks) -> None:
        """Runs a step, then the steps behind it as long as each can be planned ahead."""
        step: PlannedStep | None = first
        flight = await self._launch(first)
        while step is not None:
            following = self._plan_ahead(callbacks)
            if following is not None and self._launcher.can_launch_behind(following.batch):
                await self._launch(following, behind=True)
            try:
                result = await flight.land()
            except Exception as error:
                await self._step_failed(step, [following] if following is not None else [], error, callbacks)
                return
            lost = None
            if self._stopping and following is not None:
                lost, following = await self._cancel([following]), None
            if following is not None:
                flight = following.flight or await self._launch(following)
            self._publish(step, result, callbacks)
            if lost is not None:
                raise lost
            step = following

    async def _launch(self, step: PlannedStep, *, behind: bool = False) -> Flight:
        step.launched_ahead = behind
        step.flight = await self._launcher.launch(step.batch, ahead=step.ahead, behind=behind)
        return step.flight

    # -- one step -----------------------------------------------------------------------------------------------------

    def _plan(self, callbacks: StepCallbacks) -> PlannedStep:
        mark, started = self._mark(), time.perf_counter()
        plan = self.scheduler.schedule()
        return self._planned(plan, started, mark, callbacks, ahead=False)

    def _plan_ahead(self, callbacks: StepCallbacks) -> PlannedStep | None:
        if not self.overlap or self._stopping:
            return None
        mark, started = self._mark(), time.perf_counter()
        plan = self.scheduler.schedule_ahead()
        if plan is None:
            self.totals.schedule_s += time.perf_counter() - started
            return None
        return self._planned(plan, started, mark, callbacks, ahead=True)

    def _planned(
        self, plan: StepPlan, started: float, mark: Mark | None, callbacks: StepCallbacks, *, ahead: bool
    ) -> PlannedStep:
        step = PlannedStep(plan, worker_batch(plan), time.perf_counter() - started, ahead)
        self.totals.schedule_s += step.schedule_s
        if self._observer is not None:
            self._observer.planned(plan)
        if plan.has_work:
            self._last_planned = plan.step
            self._open.append(plan)
        callbacks.planned(plan)
        if self._trace is not None and plan.has_work:
            self._trace.note("plan_begins", plan.step, mark)
            self._trace.note("planned", plan.step)
        return step

    def _publish(self, step: PlannedStep, result: StepResult, callbacks: StepCallbacks) -> None:
        """Commits a step that landed, and publishes its results."""
        plan, started = step.plan, time.perf_counter()
        outputs = self.scheduler.commit(plan, result)
        self._landed(plan)
        how = {"ahead": step.ahead, "launched_ahead": step.launched_ahead}
        self.totals.add(plan, result, **how)
        self.speeds.stepped(plan, result.forward_s)
        commit_s = time.perf_counter() - started
        self.totals.commit_s += commit_s
        self._note("committed", plan)
        if self._observer is not None:
            self._observer.committed(plan, result, outputs, self.scheduler, step.schedule_s, commit_s, **how)
        for output in outputs:
            if output.finish is not None:
                if self._observer is not None:
                    self._observer.left(output.sequence.key, output.finish)
                self.forget(output.sequence.key)
        callbacks.committed(outputs)
        self._note("published", plan)

    def _fail(self, step: PlannedStep, error: Exception, callbacks: StepCallbacks) -> None:
        keys = error.keys if isinstance(error, RowsFailed) else None
        failed = self.scheduler.fail_step(step.plan, keys)
        self._landed(step.plan)
        self.totals.num_failed_steps += 1
        self._note("failed", step.plan)
        for sequence in failed:
            self.forget(sequence.key)
        callbacks.failed(failed, failure_kind(error), f"{type(error).__name__}: {error}")

    async def _step_failed(
        self, step: PlannedStep, behind: Seq[PlannedStep], error: Exception, callbacks: StepCallbacks
    ) -> None:
        """Raises DeviceLost: the worker exits and restarts; otherwise it would look ready and fail every step."""
        log_failed_step(step.plan.step, error)
        lost = await self._cancel(behind)
        self._fail(step, error, callbacks)
        if isinstance(error, DeviceLost):
            raise error
        if lost is not None:
            raise lost from error

    async def _cancel(self, steps: Seq[PlannedStep]) -> DeviceLost | None:
        """Cancels steps behind one that failed, or is the last one. Those that were launched end first, in their order,
        before their blocks are freed. Returns the error if the device was lost."""
        lost: DeviceLost | None = None
        for step in steps:
            if step.flight is not None and lost is None:
                try:
                    await step.flight.discard()
                except DeviceLost as error:
                    lost = error
        for step in reversed(steps):
            self.scheduler.cancel_plan(step.plan)
            self._last_planned = step.plan.step - 1
            if self._open and self._open[-1] is step.plan:
                self._open.pop()
            self._note("plan_cancelled", step.plan)
        return lost

    def _landed(self, plan: StepPlan) -> None:
        self._last_landed = plan.step
        while self._open and self._open[0].step <= plan.step:
            self._open.popleft()
        while self._forget and (self._forget[0][0] <= plan.step or plan.step >= self._last_planned):
            self.runner.drop_sequence(self._forget.popleft()[1])

    def _introduce(self, sequence: Sequence) -> None:
        tokens = sequence.tokens.view(0, sequence.num_tokens)
        self.runner.add_sequence(sequence.key, sequence.sampling, tokens.tolist(), sequence.num_prompt)
        self.wake()

    @contextmanager
    def _forget_if_refused(self, key: SequenceKey) -> Iterator[None]:
        try:
            yield
        except ValueError:
            known = self.scheduler.get(key)
            # A sequence of this key that waits or runs here keeps its sampler state. A handoff has none before it runs.
            if known is None or known.remote is not None:
                self.runner.drop_sequence(key)
            raise

    def _mark(self) -> Mark | None:
        return self._trace.mark() if self._trace is not None else None

    def _note(self, event: StepEventName, plan: StepPlan) -> None:
        if self._trace is not None:
            self._trace.note(event, plan.step)


def log_failed_step(step: int, error: Exception) -> None:
    """Logs the error of a step. It has no traceback, and is no error, if requests caused it that would fail in the same
    way on any other worker: their clients get 400, and the step runs again without them."""
    if not isinstance(error, RowsFailed) or not error.kind.recurs:
        log.error("step %d failed", step, exc_info=error)
        return
    names = sorted({request_id for request_id, _, _ in error.keys})
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    log.info("step %d cannot go on with %s%s: %s", step, ", ".join(names[:MAX_NAMED]), more, error)
