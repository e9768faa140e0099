"""A step's plan as plain data: what runs, how much of it, and why the rest does not.

Rows and outputs are made for every sequence in every step: they are msgspec's structs, whose making costs a tenth of a
frozen dataclass's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from kvrelay.engine.batch import SequenceKey
from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.scheduling.sequence import Sequence


class PlannedRow(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of a sequence, from `position` on. `sample`: its last token's logits give a token."""

    sequence: Sequence
    position: int
    num_tokens: int
    is_prefill: bool
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one step, prefill chunks first. `held_back` says why the head of the queue was not admitted."""

    step: int
    rows: Seq[PlannedRow]
    admitted: Seq[Sequence] = ()
    preempted: Seq[Sequence] = ()
    held_back: str = ""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompt chunks."""
        return sum(row.num_tokens for row in self.rows if row.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decoding sequences, one each."""
        return sum(row.num_tokens for row in self.rows if not row.is_prefill)


class PlanDraft:
    """A plan while it is made. `budget_left` may fall below 0 where a policy runs a prompt longer than the budget."""

    def __init__(self, token_budget: int) -> None:
        self.budget_left = token_budget
        self.prompts: dict[SequenceKey, PlannedRow] = {}
        self.decodes: dict[SequenceKey, PlannedRow] = {}
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.held_back = ""

    @property
    def rows(self) -> tuple[PlannedRow, ...]:
        """Prompt chunks first."""
        return (*self.prompts.values(), *self.decodes.values())

    def add_chunk(self, row: PlannedRow) -> None:
        """Adds a part of a prompt."""
        self.prompts[row.sequence.key] = row
        self.budget_left -= row.num_tokens

    def add_decode(self, row: PlannedRow) -> None:
        """Adds a decode."""
        self.decodes[row.sequence.key] = row
        self.budget_left -= 1

    def preempt(self, sequence: Sequence) -> None:
        """A sequence loses its part, if it had one, and its blocks."""
        row = self.prompts.pop(sequence.key, None) or self.decodes.pop(sequence.key, None)
        if row is not None:
            self.budget_left += row.num_tokens
        self.preempted.append(sequence)

    def finish(self, step: int) -> StepPlan:
        """The plan."""
        return StepPlan(step, self.rows, self.admitted, self.preempted, self.held_back)


class SequenceOutput(msgspec.Struct, frozen=True):
    """What a committed step gave one sequence. `index` is the output index of `token_id`.

    `prefilled`: this was the step that completed the prompt's K/V.
    """

    sequence: Sequence
    index: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    prefilled: bool = False
