"""A step's plan as plain data: what runs, how much of it, and why the rest does not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
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


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a committed step gave one sequence. `index` is the output index of `token_id`.

    `prefilled`: this was the step that completed the prompt's K/V.
    """

    sequence: Sequence
    index: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    prefilled: bool = False
