"""A step's plan as plain data: what runs, how much of it, and why the rest does not.

Rows and outputs are made for every sequence in every step: they are msgspec's structs, whose making costs a tenth of a
frozen dataclass's. They are in no cycle, so that the garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from kvrelay.engine.batch import BeamCandidates, BlockCopy, SwapCopies
from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import BeamResult, FinishReason, TokenLogprobs
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_cost import pairs


class PlannedRow(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` tokens of a sequence, from `position` on. `sample`: the logits of its last token give a token, or
    up to 1 + `num_lookahead` tokens if the runner can bring more; the block table has room for the K/V of that many.

    A decode that was planned ahead is for a token that the step in flight draws: it is not in the sequence yet.
    """

    sequence: Sequence
    position: int
    num_tokens: int
    is_prefill: bool
    sample: bool
    num_lookahead: int = 0


def work_of(rows: Iterable[PlannedRow]) -> tuple[int, float]:
    """What rows compute, as a step's cost counts it: tokens, and pairs of a token and what it attends to."""
    num_tokens, num_pairs = 0, 0.0
    for row in rows:
        num_tokens += row.num_tokens
        num_pairs += pairs(row.position, row.num_tokens)
    return num_tokens, num_pairs


@dataclass(slots=True, eq=False)
class SwapCopy:
    """A preempted sequence's K/V on the host: the first `num_tokens` tokens', one slot a block, in table order.

    `is_made`: the step that copies it out has landed. `gain_s`: what giving it up costs, by the estimate at its making.
    """

    sequence: Sequence
    slots: tuple[int, ...]
    num_tokens: int
    block_state: BlockState
    gain_s: float = 0.0
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What a step copies between pool and host before its forward: first out, then in.

    `leaving` and `returning`: whose K/V that is. `held_blocks`: the pool's blocks that these copies read or write. They
    are held as `in_flight` from the plan's end until the step has landed, besides any other holds.
    """

    out: SwapCopies
    back: SwapCopies
    leaving: Seq[SwapCopy]
    returning: Seq[SwapCopy]
    held_blocks: Seq[int]

    @property
    def num_blocks(self) -> int:
        """Blocks copied, both ways."""
        return len(self.out.blocks) + len(self.back.blocks)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one step, prefill chunks first. `held_back` says why the head of the queue was not admitted.

    `preempted` lost their blocks; `recomputed` lost their K/V, in this step or since the one before: those preempted
    without a copy, and those whose copy was given up. `swaps`: what is copied to the host and back, if anything; such
    a step is to be executed even where it has no rows. `copies`: blocks that the step copies after that and before it
    computes. `delayed`: a prefill gate held the head back. That is decided anew in the next pass, whether or not
    anything happened. A beam search is preempted as its leader alone. `reservations`: handoffs whose blocks are
    reserved now, so that their transfer may begin; they are in no row.
    """

    step: int
    rows: Seq[PlannedRow]
    admitted: Seq[Sequence] = ()
    preempted: Seq[Sequence] = ()
    held_back: str = ""
    recomputed: Seq[Sequence] = ()
    swaps: SwapPlan | None = None
    delayed: bool = False
    copies: Seq[BlockCopy] = ()
    reservations: Seq[Sequence] = ()

    @property
    def has_work(self) -> bool:
        """Whether there is anything to execute."""
        return bool(self.rows or self.copies) or self.swaps is not None

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompt chunks."""
        return sum(row.num_tokens for row in self.rows if row.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decoding sequences, one each."""
        return sum(row.num_tokens for row in self.rows if not row.is_prefill)


class NeedsCommit(Exception):
    """A step cannot be planned before the one in flight is committed: it would have to take blocks from somebody."""


class PlanDraft:
    """A plan while it is made. `budget_left` may fall below 0 where a policy runs a prompt longer than the budget.

    `ahead`: a step is in flight; nobody may be preempted.
    """

    def __init__(self, token_budget: int, *, ahead: bool = False) -> None:
        self.budget_left = token_budget
        self.ahead = ahead
        self.prompts: dict[Sequence, PlannedRow] = {}
        self.decodes: dict[Sequence, PlannedRow] = {}
        self.prompting: list[Sequence] | None = None  # that run and do not decode; None: nobody has looked
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.recomputed: list[Sequence] = []
        self.leaving: dict[SwapCopy, SwapCopies] = {}
        self.returning: dict[SwapCopy, SwapCopies] = {}
        self.held_back = ""
        self.delayed = False

    @property
    def rows(self) -> tuple[PlannedRow, ...]:
        """Prompt chunks first."""
        return (*self.prompts.values(), *self.decodes.values())

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds the next `num_tokens` tokens of a prompt. The chunk that completes the prompt samples a token."""
        sample = num_tokens == sequence.num_remaining and sequence.wants_token
        self.prompts[sequence] = PlannedRow(sequence, sequence.next_position, num_tokens, True, sample)
        self.budget_left -= num_tokens

    def add_decode(self, row: PlannedRow) -> None:
        """Adds a decode."""
        self.decodes[row.sequence] = row
        self.budget_left -= 1

    def add_decodes(self, rows: Seq[PlannedRow]) -> None:
        """Adds decodes, but for those of sequences that were preempted since."""
        if self.preempted:
            rows = [row for row in rows if row.sequence.state is SequenceState.RUNNING]
        self.decodes |= {row.sequence: row for row in rows}
        self.budget_left -= len(rows)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence loses its part, if it had one, and its blocks."""
        self.drop_row(sequence)
        self.preempted.append(sequence)

    def drop_row(self, sequence: Sequence) -> None:
        """A sequence loses its part, if it had one."""
        row = self.prompts.pop(sequence, None) or self.decodes.pop(sequence, None)
        if row is not None:
            self.budget_left += row.num_tokens

    def finish(
        self,
        step: int,
        swaps: SwapPlan | None = None,
        copies: Seq[BlockCopy] = (),
        reservations: Seq[Sequence] = (),
    ) -> StepPlan:
        """The plan."""
        return StepPlan(
            *(step, self.rows, self.admitted, self.preempted, self.held_back, self.recomputed, swaps, self.delayed),
            copies=copies,
            reservations=reservations,
        )


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What a committed step brought one sequence.

    `token_ids`: its new tokens, from output index `index` on; none behind the one that ends it. `logprobs`: one entry
    for each of them if the sequence asks for log-probabilities, else none. `prefilled`: this was the step that
    completed the prompt's K/V. A beam search brings no tokens. On a prefill worker it brings the `candidates` that
    follow the prompt, and at its end its `beams`.
    """

    sequence: Sequence
    index: int
    token_ids: Seq[int] = ()
    logprobs: Seq[TokenLogprobs] = ()
    prompt_logprobs: Seq[TokenLogprobs] = ()
    finish: FinishReason | None = None
    prefilled: bool = False
    candidates: BeamCandidates | None = None
    beams: Seq[BeamResult] = ()
