"""Request-level batches, as NVIDIA's FasterTransformer runs them: a batch is formed when the one before has completely
finished. Its prompts are computed first, then all decode together; a sequence that ends early leaves a gap that nobody
fills, and an arrival waits for the longest output of the batch before it.

A sequence that was adopted with its prompt computed joins the decodes as it comes.
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
            if not draft.prompts:  # what was admitted comes back from the host in the middle of its output
                planner.plan_decodes(draft)
            return
        planner.admit_rest_of_groups(draft)
        planner.admit_handoffs(draft)
        draft.held_back = "a batch is running" if planner.waiting else "queue empty"
        planner.plan_prompts(draft)
        if not draft.prompts:
            planner.plan_decodes(draft)
