"""The step loop sleeps only while nothing can be planned."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

from kvrelay.scheduling.plan import StepPlan
from kvrelay.worker.step_loop import StepCallbacks, StepLoop


def test_a_sequence_that_preempted_itself_is_planned_again_at_once() -> None:
    """It was alone, so the blocks that it lost are the only ones that come back, and nothing else wakes the loop."""
    preempted: Any = Mock()
    plans = [StepPlan(1, [], preempted=[preempted]), StepPlan(2, [])]
    planned: list[int] = []
    scheduler: Any = Mock(schedule=lambda: plans[min(len(planned), 1)])
    loop = StepLoop(Mock(), scheduler)

    async def test() -> None:
        callbacks = StepCallbacks(lambda plan: planned.append(plan.step), Mock(), Mock())
        running = asyncio.create_task(loop.run(callbacks))
        await asyncio.sleep(0.05)
        assert planned == [1, 2]  # and then it sleeps
        loop.stop()
        await running

    asyncio.run(asyncio.wait_for(test(), 5))
