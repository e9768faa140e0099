"""The step loops of workers with several ranks: those of a group with data-parallel attention, and a pipeline.

All ranks of a group with data-parallel attention take each step together. A pass begins with an exchange of a few
integers, in which each rank says whether it has something to do, and what the prefill delayer needs. If any rank has,
all plan and run a step, those without rows an empty one. Otherwise the group sleeps. A rank that gets work then wakes
the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kvrelay.ranks.lockstep_group import LockstepGroup
from kvrelay.scheduling.queue.prefill_delay import NO_LOAD, PrefillDelayer, RankLoad
from kvrelay.step.batch import DeviceLost, StepResult
from kvrelay.worker.step_loop import PlannedStep, StepCallbacks, StepLoop, log_failed_step


class LockstepLoop(StepLoop):
    """Neither plans nor launches ahead: the exchange for the next step is behind this one."""

    def __init__(self, *args: Any, group: LockstepGroup, **options: Any) -> None:
        """The other arguments are those of `StepLoop`."""
        super().__init__(*args, **(options | {"overlap": False}))
        self.delayer: PrefillDelayer | None = None
        self.num_passes = 0
        self.num_empty_steps = 0  # steps for which this rank had no rows
        self.on_all_leaving: Callable[[], None] = lambda: None
        self.group = group
        self._is_active = False  # the latest pass planned something, so there may be more
        self._is_leaving = False
        self._woken_for = -1

    def leave_together(self) -> None:
        """This rank takes no new work. Once that holds for all, `run` ends and `on_all_leaving` is called."""
        self._is_leaving = True
        self.wake()

    def woken(self, num_passes: int) -> None:
        """Another rank got work after so many passes and waits for this one."""
        self._woken_for = max(self._woken_for, num_passes)
        self._wake.set()

    def stop(self) -> None:
        """Ends `run`, also in a pass: call it when no step is needed any more."""
        super().stop()
        self.group.leave()

    async def run(self, callbacks: StepCallbacks) -> None:
        """Runs the loop until `stop`. Raises DeviceLost, also if another rank has left."""
        try:
            while not self._stopping:
                if await self._begin_pass():
                    await self._run_pass(callbacks)
                else:
                    await self._sleep()
        except DeviceLost:
            if not self._stopping:
                raise
        self._launcher.close()
        if self._observer is not None:
            self._observer.close()

    async def _begin_pass(self) -> bool:
        """Exchanges the ranks' loads. Returns whether any of them has something to do."""
        is_active = self._is_active or self._wake.is_set()
        self._wake.clear()
        load = self._load()
        every = await self.group.exchange((int(is_active), int(self._is_leaving), *load))
        self.num_passes += 1
        if self.delayer is not None:
            self.delayer.begin_pass([RankLoad(*numbers) for _, _, *numbers in every], self.group.rank)
        if all(is_leaving for _, is_leaving, *_ in every):
            # No rank may take another step: one that leaves earlier would be missing in it.
            super().stop()
            self.on_all_leaving()
            return False
        return any(active for active, *_ in every)

    def _load(self) -> RankLoad:
        if self.delayer is None:
            return NO_LOAD
        scheduler = self.scheduler
        return self.delayer.load(len(scheduler.running), prefillable=scheduler.admission.may_admit_prompt)

    async def _run_pass(self, callbacks: StepCallbacks) -> None:
        step = self._plan(callbacks)
        plan = step.plan
        self._is_active = bool(plan.has_work or plan.delayed or plan.preempted)
        self.num_empty_steps += not plan.has_work
        flight = await self._launch(step)
        try:
            result = await flight.land()
        except Exception as error:
            self._failed(step, error, callbacks)
            if isinstance(error, DeviceLost):
                raise
            return
        if plan.has_work:
            self._publish(step, result, callbacks)

    def _failed(self, step: PlannedStep, error: Exception, callbacks: StepCallbacks) -> None:
        if self._stopping and isinstance(error, DeviceLost):
            return
        log_failed_step(step.plan.step, error)
        if step.plan.has_work:
            self._fail(step, error, callbacks)

    async def _sleep(self) -> None:
        """Waits until this rank or another one has something to do."""
        while not self._stopping and self._woken_for < self.num_passes:
            if self._wake.is_set():
                self.group.wake_others(self.num_passes)
                return
            await self._wake.wait()


class PipelinedStepLoop(StepLoop):
    """Keeps as many steps in flight as the scheduler plans, and lands them in order.

    The first ranks compute a step as soon as it is launched. A step that cannot be launched behind others is held
    until these have landed. While a step is committed, the last ranks compute the next one.
    """

    max_in_flight = 2
    """Steps that are launched or held, at most."""

    async def _run_from(self, first: PlannedStep, callbacks: StepCallbacks) -> None:
        """Runs a step and those behind it, until none is in flight."""
        steps = deque([first])
        landing: asyncio.Future[StepResult] | None = None
        while steps:
            self._wake.clear()
            if landing is None:
                landing = (steps[0].flight or await self._launch(steps[0])).land()
            await self._fill(steps, callbacks)
            if not await self._await_landing(landing, may_plan=len(steps) < self.max_in_flight):
                continue  # there may be more to plan
            step = steps.popleft()
            error = landing.exception()
            if error is not None:
                if not isinstance(error, Exception):
                    raise error
                await self._step_failed(step, list(steps), error, callbacks)
                return
            lost = await self._cancel(list(steps)) if self._stopping else None
            if self._stopping:
                steps.clear()
            is_launched = bool(steps) and steps[0].flight is not None
            result, landing = landing.result(), steps[0].flight.land() if is_launched and steps[0].flight else None
            self._publish(step, result, callbacks)
            if lost is not None:
                raise lost

    async def _fill(self, steps: deque[PlannedStep], callbacks: StepCallbacks) -> None:
        """Plans and launches steps behind those in flight."""
        while len(steps) < self.max_in_flight and steps[-1].flight is not None:
            step = self._plan_ahead(callbacks)
            if step is None:
                return
            steps.append(step)
            if self._launcher.can_launch_behind(step.batch):
                await self._launch(step, behind=True)

    async def _await_landing(self, landing: asyncio.Future[StepResult], *, may_plan: bool) -> bool:
        """Returns True once the step has ended, or False if something changed before and another may be planned."""
        if not may_plan:
            await asyncio.wait([landing])
            return True
        woken = asyncio.create_task(self._wake.wait())
        either: list[asyncio.Future[Any]] = [landing, woken]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        return landing.done()
