"""Request-level batches, as NVIDIA's FasterTransformer runs them: a batch is formed when the one before has completely
finished. Its prompts are computed first, then all decode together; a sequence that ends early leaves a gap that nobody
fills, and an arrival waits for the longest output of the batch before it.

A sequence that was adopted with its prompt computed joins the decodes as it comes.
"""

from __future__ import annotations

from kvrelay.scheduling.memory.block_manager import WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, WholePrompts
from kvrelay.scheduling.scheduler import BatchScheduler


class FasterTransformerScheduler(BatchScheduler):
    """One batch from its first prompt to its last token."""

    block_manager = WholeSequenceBlocks

    def make_chunks(self) -> Chunks:
        """Prompts are not cut; a batch's prompts may take several steps."""
        return WholePrompts()

    def fill(self, draft: PlanDraft) -> None:
        """A new batch; or the rest of its prompts; or its decodes."""
        if not self.running:
            self.admit_prompts(draft, beyond_budget=True)
            if not draft.prompts:  # what was admitted comes back from the host in the middle of its output
                self.plan_decodes(draft)
            return
        self.admit_rest_of_groups(draft)
        self.admit_handoffs(draft)
        draft.held_back = "a batch is running" if self.waiting else "queue empty"
        self.plan_prompts(draft)
        if not draft.prompts:
            self.plan_decodes(draft)
