"""Stall-free batching under a token budget (Agrawal et al., Sarathi-Serve, OSDI 2024).

Each step holds every running decode first, then prompt chunks in what is left of the budget, so that the gap between
two tokens of a stream is bounded by one step of the budget, whatever the length of the prompts beside it.
"""

from __future__ import annotations

from kvrelay.scheduling.plan import PlanDraft
from kvrelay.scheduling.policies.chunk_sizes import Chunks, make_chunks
from kvrelay.scheduling.scheduler import BatchScheduler


class SarathiScheduler(BatchScheduler):
    """Decodes first, then chunks; a decode that finds no block preempts others."""

    mixes_prompts_and_decodes = True

    def make_chunks(self) -> Chunks:
        """Chunks of fixed size or of equal time."""
        return make_chunks(self.settings.chunking, self.limits.token_budget)

    def fill(self, draft: PlanDraft) -> None:
        """Decodes, chunks of prompts that run, chunks of new ones."""
        self.plan_decodes(draft)
        self.plan_prompts(draft)
        self.admit_prompts(draft)
