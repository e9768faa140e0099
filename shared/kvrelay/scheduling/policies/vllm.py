"""Whole prompts first, then decodes: vLLM's first scheduler (Kwon et al., PagedAttention, SOSP 2023, section 4.5).

Time to first token is short and batches are large, but a step that computes prompts computes nothing else: running
decodes wait for as long as the prompts are long.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import OnDemandBlocks
from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler import BatchScheduler


class VllmScheduler(BatchScheduler):
    """A step of prompts, within the token budget or one alone that is longer; decodes when there are none to admit."""

    block_manager = OnDemandBlocks

    def make_chunks(self) -> Chunks:
        """Prompts are not cut."""
        return WholePrompts()

    def fill(self, draft: PlanDraft) -> None:
        """Prompts if any can be admitted, or run: because their step failed, or as beams that lost their blocks."""
        self.plan_prompts(draft)
        self.admit_prompts(draft)
        if not draft.prompts:
            self.plan_decodes(draft)
