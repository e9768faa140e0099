"""Iteration-level scheduling (Yu et al., Orca, OSDI 2022, section 3): sequences join and leave at every step.

Prompts run in one piece, mixed with the decodes, so decodes never wait, but a step with a long prompt is long. Blocks
for the longest possible output are reserved at admission, so no sequence is ever preempted, and most of these blocks
stay empty. Orca bounds a batch by its number of sequences only. Here the token budget also bounds the prompts that
start in one step, except that the first one may be longer.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import BlockManager, WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.step_planner import StepPlanner


class OrcaPolicy:
    """All decodes, and whole prompts beside them."""

    block_manager: type[BlockManager] = WholeSequenceBlocks
    mixes_prompts_and_decodes: bool = True

    def make_chunks(self, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
        return WholePrompts()

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_decodes(builder)
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)
