"""Request-level batches, as in NVIDIA's FasterTransformer: a batch is formed when the one before has finished
completely. Its prompts are computed first, then all its sequences decode together. The slot of a sequence that ends
early remains empty, and an arrival waits for the longest output of the batch before it.

A handoff joins the decodes as soon as it is complete.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager, WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class FasterTransformerPolicy:
    """One batch from its first prompt to its last token."""

    block_manager: type[BlockManager] = WholeSequenceBlocks
    mixes_prompts_and_decodes: bool = False

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return WholePrompts()

    def fill(self, planner: StepPlanner, draft: PlanDraft) -> None:
        if not planner.running:
            planner.admit_prompts(draft, beyond_budget=True)
            if not draft.prompts:  # the admitted sequences were swapped, and continue their output
                planner.plan_decodes(draft)
            return
        planner.admit_rest_of_groups(draft)
        planner.admit_handoffs(draft)
        draft.held_back = "a batch is running" if planner.waiting else "queue empty"
        planner.plan_prompts(draft)
        if not draft.prompts:
            planner.plan_decodes(draft)
