"""The step loop of a rank with data-parallel attention: all ranks of its group take each step together.

A pass begins with an exchange of a few integers, in which each rank says whether it has something to do, and what the
prefill delayer needs. If any rank has, all plan and run a step, those without rows an empty one. Otherwise the group
sleeps. A rank that gets work then wakes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrelay.ranks.lockstep_group import LockstepGroup
from kvrelay.scheduling.queue.prefill_delay import NO_LOAD, PrefillDelayer, RankLoad
from kvrelay.step.batch import DeviceLost
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
        every = await self.group.exchange((int(is_active), int(self._is_leaving), *load.numbers))
        self.num_passes += 1
        if self.delayer is not None:
            self.delayer.begin_pass([RankLoad.of(numbers) for _, _, *numbers in every], self.group.rank)
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
