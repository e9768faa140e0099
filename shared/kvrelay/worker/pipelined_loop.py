"""The step loop of a worker whose model is a pipeline: several steps are in flight, each in another stage."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from kvrelay.step.batch import StepResult
from kvrelay.worker.step_loop import PlannedStep, StepCallbacks, StepLoop


class PipelinedStepLoop(StepLoop):
    """Keeps as many steps in flight as the scheduler plans, and lands them in order.

    The first stage computes a step as soon as it is launched. A step that cannot be launched behind others is held
    until these have landed. While a step is committed, the last stage computes the next one.
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
