"""Chunked prompts without mixing: the ablation "chunked prefills only" (Agrawal et al., Sarathi-Serve, OSDI 2024,
section 5.4). Steps of prompt chunks and steps of decodes take turns, so that a decode waits for one chunk at most, but
every chunk's step is one without decodes.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks, make_chunks
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class SimpleChunkingPolicy:
    """Steps of prompt chunks and steps of decodes alternate. A step without work is left to the other kind."""

    block_manager: type[BlockManager] = BlockManager
    mixes_prompts_and_decodes: bool = False

    def __init__(self) -> None:
        self._decodes_are_next = False

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return make_chunks(settings.chunking, limits.token_budget)

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        if self._decodes_are_next:
            planner.plan_decodes(builder)
            builder.held_back = "it was the decodes' turn" if builder.decodes else ""
        if not builder.decodes:
            planner.plan_prompts(builder)
            planner.admit_prompts(builder)
        if not builder.rows:
            planner.plan_decodes(builder)
        self._decodes_are_next = bool(builder.prompts)
