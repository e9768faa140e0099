"""Stall-free batching under a token budget (Agrawal et al., Sarathi-Serve, OSDI 2024).

Each step holds every running decode first, then prompt chunks in what is left of the budget, so that the gap between
two tokens of a stream is bounded by one step of the budget, whatever the length of the prompts beside it.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks, make_chunks
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class SarathiPolicy:
    """Decodes first, then chunks; a decode that finds no block preempts others."""

    block_manager: type[BlockManager] = BlockManager
    mixes_prompts_and_decodes: bool = True

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return make_chunks(settings.chunking, limits.token_budget)

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_decodes(builder)
        planner.admit_neglected(builder)
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)
