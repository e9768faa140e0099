"""Iteration-level scheduling (Yu et al., Orca, OSDI 2022, section 3): sequences join and leave at every step.

Prompts run in one piece, mixed with the decodes: no step is without decodes, but one with a long prompt is long. Room
for the longest possible output is reserved at admission, so that nobody is ever preempted, and most of it lies idle.
Orca bounds a batch by its sequences alone; here the token budget bounds the prompts that start in one step, too, except
that the first one may be longer.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager, WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class OrcaPolicy:
    """All decodes, and whole prompts beside them."""

    block_manager: type[BlockManager] = WholeSequenceBlocks
    mixes_prompts_and_decodes: bool = True

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return WholePrompts()

    def fill(self, planner: StepPlanner, draft: PlanDraft) -> None:
        planner.plan_decodes(draft)
        planner.plan_prompts(draft)
        planner.admit_prompts(draft)
