"""How many tokens of a prompt the next step computes."""

from __future__ import annotations

from typing import Protocol

from kvrelay.scheduling.plan import PlanDraft, StepPlan, work_of
from kvrelay.scheduling.scheduler_settings import Chunking
from kvrelay.scheduling.step_cost import CalibratedCost, StepCost, pairs

MIN_CHUNK = 16
"""Dynamic chunks are not shorter: a prompt goes on however much the decodes beside it attend to."""


class Chunks(Protocol):
    """Sizes chunks, and may learn from the steps they were part of."""

    def size(self, num_remaining: int, position: int, draft: PlanDraft) -> int:
        """Tokens of a prompt from `position` on that join the draft; 0: none, and none of the prompts behind it."""
        ...

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """A step took so long."""
        ...

    def calibrate(self, cost: StepCost) -> None:
        """What steps cost was measured at the start."""
        ...


class FixedChunks:
    """What is left of the token budget (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4.2)."""

    def size(self, num_remaining: int, position: int, draft: PlanDraft) -> int:
        """See `Chunks`."""
        return min(num_remaining, max(0, draft.budget_left))

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """Learns nothing."""

    def calibrate(self, cost: StepCost) -> None:
        """Needs no cost."""


class WholePrompts:
    """Prompts in one piece within the token budget; one that is longer is its step's only prompt."""

    def size(self, num_remaining: int, position: int, draft: PlanDraft) -> int:
        """See `Chunks`."""
        return num_remaining if num_remaining <= draft.budget_left or not draft.prompts else 0

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """Learns nothing."""

    def calibrate(self, cost: StepCost) -> None:
        """Needs no cost."""


class DynamicChunks:
    """Chunks of nearly equal time: as much as a step of the whole budget at a prompt's start takes, and never more
    tokens than the budget. Later chunks attend to more, so they have fewer tokens.
    """

    def __init__(self, token_budget: int, cost: CalibratedCost | None = None) -> None:
        self._token_budget = token_budget
        self.cost = cost or CalibratedCost()

    def size(self, num_remaining: int, position: int, draft: PlanDraft) -> int:
        """See `Chunks`."""
        cost = self.cost.current
        target_s = cost.step_s(self._token_budget, pairs(0, self._token_budget))
        left_s = target_s - cost.step_s(*work_of(draft.rows))
        least = 0 if draft.prompts else MIN_CHUNK
        return min(num_remaining, max(0, draft.budget_left), max(least, cost.tokens_within(left_s, position)))

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """Corrects the cost model."""
        self.cost.observe(*work_of(plan.rows), forward_s)

    def calibrate(self, cost: StepCost) -> None:
        """Starts from this model; measured steps correct it as before."""
        self.cost = CalibratedCost(cost)


def make_chunks(chunking: Chunking, token_budget: int) -> Chunks:
    """The chunks that the settings ask for."""
    return DynamicChunks(token_budget) if chunking == "dynamic" else FixedChunks()
