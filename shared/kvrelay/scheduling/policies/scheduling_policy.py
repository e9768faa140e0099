"""The interface of scheduling policies."""

from __future__ import annotations

from typing import Protocol

from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class SchedulingPolicy(Protocol):
    """Decides what each step contains. Every scheduler has a policy object of its own, which may keep state between
    steps."""

    block_manager: type[BlockManager]
    """Decides how many blocks a sequence gets at admission."""

    mixes_prompts_and_decodes: bool
    """Whether a sequence that was swapped decodes in the step that admits it."""

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        """Returns how prompts are cut."""
        ...

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        """Fills the builder of a step by the planner's methods."""
        ...
