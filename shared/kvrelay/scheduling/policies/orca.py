"""Iteration-level scheduling (Yu et al., Orca, OSDI 2022, section 3): sequences join and leave at every step.

Prompts run in one piece, mixed with the decodes: no step is without decodes, but one with a long prompt is long. Room
for the longest possible output is reserved at admission, so that nobody is ever preempted, and most of it lies idle.
Orca bounds a batch by its sequences alone; here the token budget bounds the prompts that start in one step, too, except
that the first one may be longer.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler import BatchScheduler


class OrcaScheduler(BatchScheduler):
    """All decodes, and whole prompts beside them."""

    block_manager = WholeSequenceBlocks
    mixes_prompts_and_decodes = True

    def make_chunks(self) -> Chunks:
        """Prompts are not cut."""
        return WholePrompts()

    def fill(self, draft: PlanDraft) -> None:
        """Decodes, then prompts: first those whose step failed because of others, or beams that lost their blocks."""
        self.plan_decodes(draft)
        self.plan_prompts(draft)
        self.admit_prompts(draft)
