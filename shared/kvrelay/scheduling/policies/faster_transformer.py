"""Request-level batches, as in NVIDIA's FasterTransformer: a batch is formed when the one before has finished
completely. Its prompts are computed first, then all its sequences decode together. The slot of a sequence that ends
early remains empty, and an arrival waits for the longest output of the batch before it.

A handoff joins the decodes as soon as it is complete.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager, WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class FasterTransformerPolicy:
    """One batch from its first prompt to its last token."""

    block_manager: type[BlockManager] = WholeSequenceBlocks
    mixes_prompts_and_decodes: bool = False

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return WholePrompts()

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        if not planner.running:
            planner.admit_prompts(builder, beyond_budget=True)
            if not builder.prompts:  # the admitted sequences were swapped, and continue their output
                planner.plan_decodes(builder)
            return
        planner.admit_rest_of_groups(builder)
        planner.admit_handoffs(builder)
        builder.held_back = "a batch is running" if planner.waiting else "queue empty"
        planner.plan_prompts(builder)
        if not builder.prompts:
            planner.plan_decodes(builder)
