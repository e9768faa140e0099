"""Chunked prompts without mixing: the ablation "chunked prefills only" (Agrawal et al., Sarathi-Serve, OSDI 2024,
section 5.4). Steps of prompt chunks and steps of decodes take turns, so that a decode waits for one chunk at most, but
every chunk's step is one without decodes.
"""

from __future__ import annotations

from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, make_chunks
from kvrelay.scheduling.scheduler import BatchScheduler


class SimpleChunkingScheduler(BatchScheduler):
    """Prompts' turn, decodes' turn; whoever has nothing to do leaves its turn to the other."""

    _decodes_are_next = False

    def make_chunks(self) -> Chunks:
        """Chunks of fixed size or of equal time."""
        return make_chunks(self.settings.chunking, self.limits.token_budget)

    def fill(self, draft: PlanDraft) -> None:
        """A turn."""
        if self._decodes_are_next:
            self.plan_decodes(draft)
            draft.held_back = "it was the decodes' turn" if draft.decodes else ""
        if not draft.decodes:
            self.plan_prompts(draft)
            self.admit_prompts(draft)
        if not draft.rows:
            self.plan_decodes(draft)
        self._decodes_are_next = bool(draft.prompts)
