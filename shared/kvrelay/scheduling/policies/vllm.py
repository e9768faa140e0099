"""Whole prompts first, then decodes: vLLM's first scheduler (Kwon et al., PagedAttention, SOSP 2023, section 4.5).

Time to first token is short and batches are large, but a step that computes prompts computes nothing else: running
decodes wait for as long as the prompts are long.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager, OnDemandBlocks
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class VllmPolicy:
    """A step of prompts, within the token budget or one alone that is longer; decodes when there are none to admit."""

    block_manager: type[BlockManager] = OnDemandBlocks
    mixes_prompts_and_decodes: bool = False

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return WholePrompts()

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)
        if not builder.prompts:
            planner.plan_decodes(builder)
