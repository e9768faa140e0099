"""The steps of an engine: one at a time, or with a pipeline as many in flight as the scheduler plans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvrelay.engine.model_runner import LaunchedStep, ModelRunner
from kvrelay.scheduling.plan import StepPlan, worker_batch
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import DeviceLost, StepResult, WorkerBatch
from kvrelay.worker.step_loop import StepTotals

Landed = tuple[StepPlan, StepResult | BaseException]


class EngineSteps:
    """Plans, launches and lands steps. The caller commits each before the next `run`, or marks it failed."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_in_flight: int,
        totals: StepTotals,
    ) -> None:
        """The runner `launches_ahead` if `max_in_flight` is above 1."""
        self.recomputed: list[Sequence] = []
        """Sequences whose KV was lost, of all plans. The caller clears it."""
        self._runner = runner
        self._scheduler = scheduler
        self._max_in_flight = max_in_flight
        self._totals = totals
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._held: tuple[StepPlan, WorkerBatch] | None = None  # cannot be launched behind those in flight

    @property
    def are_in_flight(self) -> bool:
        return bool(self._in_flight) or self._held is not None

    def run(self) -> Landed | None:
        """Lands the oldest step, after launching what can be planned behind it. If that step failed, those behind it
        are cancelled. Returns None if there is nothing to do. Raises DeviceLost."""
        if not self.are_in_flight:
            plan = self._plan(ahead=False)
            if plan is None:
                return None
            self._held = plan, worker_batch(plan)
        if not self._in_flight and self._held is not None:
            (plan, batch), self._held = self._held, None
            if self._max_in_flight == 1:
                return self._landed(plan, lambda: self._runner.execute(batch))
            try:
                self._launch(plan, batch)
            except DeviceLost:
                raise
            except Exception as error:
                return plan, error
        self._fill()
        plan, flight = self._in_flight.popleft()
        return self._landed(plan, flight.land)

    def _fill(self) -> None:
        while self._held is None and len(self._in_flight) < self._max_in_flight:
            plan = self._plan(ahead=True)
            if plan is None:
                return
            batch = worker_batch(plan)
            if self._runner.can_launch_behind(batch):
                self._launch(plan, batch)
            else:
                self._held = plan, batch

    def _launch(self, plan: StepPlan, batch: WorkerBatch) -> None:
        self._in_flight.append((plan, self._runner.launch(batch)))

    def _plan(self, *, ahead: bool) -> StepPlan | None:
        started = time.perf_counter()
        plan = self._scheduler.schedule_ahead() if ahead else self._scheduler.schedule()
        if plan is not None:
            self.recomputed += plan.recomputed
        self._totals.schedule_s += time.perf_counter() - started
        return plan if plan is not None and plan.has_work else None

    def _landed(self, plan: StepPlan, land: Callable[[], StepResult]) -> Landed:
        try:
            return plan, land()
        except DeviceLost:
            raise
        except BaseException as error:
            self._cancel_others()
            return plan, error

    def _cancel_others(self) -> None:
        plans = [plan for plan, _ in self._in_flight]
        if self._held is not None:
            plans.append(self._held[0])
        flights, self._held = [flight for _, flight in self._in_flight], None
        self._in_flight.clear()
        try:
            for flight in flights:
                flight.discard()
        finally:
            for plan in reversed(plans):
                self._scheduler.cancel_plan(plan)
