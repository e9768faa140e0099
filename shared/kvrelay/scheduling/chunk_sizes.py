"""Chunk sizes: how many tokens of a prompt the next step computes."""

from __future__ import annotations

from kvrelay.scheduling.plan import PlanBuilder, StepPlan, work_of
from kvrelay.scheduling.step_cost import CalibratedCost, StepCost, pairs

MIN_CHUNK = 16
"""The shortest dynamic chunk, so that a prompt advances however long the decodes of its step take."""


class Chunks:
    """How many tokens of a prompt join a step: the rest of the token budget (Agrawal et al., Sarathi-Serve, OSDI 2024,
    section 4.2)."""

    def size(self, num_remaining: int, position: int, builder: PlanBuilder) -> int:
        """Returns how many tokens of a prompt, from `position` on, join the builder. 0: none, also of later prompts."""
        return min(num_remaining, max(0, builder.budget_left))

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """A step took `forward_s`."""

    def calibrate(self, cost: StepCost) -> None:
        """Takes the cost of steps that was measured at the start."""


class WholePrompts(Chunks):
    """Prompts are not cut. They fit the token budget together; a prompt longer than the budget is alone in its step."""

    def size(self, num_remaining: int, position: int, builder: PlanBuilder) -> int:
        return num_remaining if num_remaining <= builder.budget_left or not builder.prompts else 0


class DynamicChunks(Chunks):
    """Chunks of nearly equal time: the time of a chunk of the whole token budget at the start of a prompt. Never more
    tokens than the budget. Later chunks attend to more tokens, so they are shorter."""

    def __init__(self, token_budget: int, cost: CalibratedCost | None = None) -> None:
        self._token_budget = token_budget
        self.cost = cost or CalibratedCost()

    def size(self, num_remaining: int, position: int, builder: PlanBuilder) -> int:
        cost = self.cost.current
        target_s = cost.step_s(self._token_budget, pairs(0, self._token_budget))
        left_s = target_s - cost.step_s(*work_of(builder.rows))
        least = 0 if builder.prompts else MIN_CHUNK
        return min(num_remaining, max(0, builder.budget_left), max(least, cost.tokens_within(left_s, position)))

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """Corrects the cost model by the step."""
        self.cost.observe(*work_of(plan.rows), forward_s)

    def calibrate(self, cost: StepCost) -> None:
        """Starts from this cost. Measured steps correct it as before."""
        self.cost = CalibratedCost(cost)
