"""A step's plan as plain data: what runs, how much of it, and why the rest does not.

Rows and outputs are created for every sequence in every step, so they are msgspec structs: creating one costs a tenth
of a frozen dataclass. They form no reference cycles, so the garbage collector skips them (`gc=False`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import FinishReason, ScoredText, TokenLogprobs
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_cost import pairs
from kvrelay.step.batch import BlockCopy, Candidates, CandidatesWanted, HostCopies, WorkerBatch, WorkerRow


class PlannedRow(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` tokens of a sequence, from `position` on. `sample`: the logits of its last token give a token.
    A decode has one token, or several behind tokens that a grammar forced. `guesses`: of the tokens behind. The
    step computes them too, so it may bring up to 1 + len(guesses) tokens; the block table has room for them.

    A decode that was planned ahead is for a token that the step in flight draws: it is not in the sequence yet.
    """

    sequence: Sequence
    position: int
    num_tokens: int
    is_prefill: bool
    sample: bool
    guesses: NDArray[np.int32] | None = None

    @property
    def num_computed(self) -> int:
        """Number of tokens that the step computes, with guesses."""
        return self.num_tokens if self.guesses is None else self.num_tokens + len(self.guesses)


def work_of(rows: Iterable[PlannedRow]) -> tuple[int, float]:
    """What rows compute, as a step's cost counts it: tokens, and pairs of a token and what it attends to."""
    num_tokens, num_pairs = 0, 0.0
    for row in rows:
        num_computed = row.num_computed
        num_tokens += num_computed
        num_pairs += pairs(row.position, num_computed)
    return num_tokens, num_pairs


@dataclass(slots=True, eq=False)
class HostCopy:
    """The KV of a preempted sequence on the host: its first `num_tokens` tokens, one slot per block, in table order.

    `is_made`: the step that copies it out has ended. `gain_s`: estimated time that is lost if it is dropped.
    """

    sequence: Sequence
    slots: tuple[int, ...]
    num_tokens: int
    block_state: BlockState
    gain_s: float = 0.0
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class HostCopyPlan:
    """The copies between pool and host that a step makes before its forward: first out, then in.

    `leaving` and `returning`: the sequences' copies. `held_blocks`: the pool's blocks that the copies read or write.
    They are held as `in_flight` from the plan until the step has ended, besides any other holds.
    """

    out: HostCopies
    back: HostCopies
    leaving: Seq[HostCopy]
    returning: Seq[HostCopy]
    held_blocks: Seq[int]

    @property
    def num_blocks(self) -> int:
        """Number of blocks copied, both ways."""
        return len(self.out.blocks) + len(self.back.blocks)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step: its rows, prefill chunks first, and its effects.

    `preempted`: sequences that lost their blocks, with forks only their leader. `recomputed`: sequences
    whose KV was lost since the plan before: preempted without a copy, or with a copy that was dropped. `held_back`: why
    the head of the queue was not admitted. `delayed`: the prefill gate held it back, and is asked again in the next
    pass whether or not anything has changed. `host_copies`: to and from the host, made even if there are no rows.
    `copies`: blocks that are copied after that and before the forward. `reservations`: handoffs whose blocks are
    reserved now, so that their transfer may begin. They have no rows. `has_guesses`: some rows may have guesses.
    `jumping`: sequences whose rows may bring tokens that grammars force.
    """

    step: int
    rows: Seq[PlannedRow]
    admitted: Seq[Sequence] = ()
    preempted: Seq[Sequence] = ()
    held_back: str = ""
    recomputed: Seq[Sequence] = ()
    host_copies: HostCopyPlan | None = None
    delayed: bool = False
    copies: Seq[BlockCopy] = ()
    reservations: Seq[Sequence] = ()
    has_guesses: bool = False
    jumping: Collection[Sequence] = ()

    @property
    def has_work(self) -> bool:
        """Returns whether the step has anything to execute."""
        return bool(self.rows or self.copies) or self.host_copies is not None

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens in prompt chunks."""
        return sum(row.num_tokens for row in self.rows if row.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens of decoding sequences: one each, guesses, and more behind forced tokens."""
        if self.has_guesses:
            return sum(row.num_computed for row in self.rows if not row.is_prefill)
        return sum(row.num_tokens for row in self.rows if not row.is_prefill)


class NeedsCommit(Exception):
    """The step in flight must be committed first: planning this one would preempt a sequence, or copy one back."""


class PlanBuilder:
    """A plan while it is made. `budget_left` may fall below 0 if a policy runs a prompt longer than the budget.

    `ahead`: steps are in flight, and no sequence may be preempted. `num_decode_steps`: those of
    them that have decodes.
    """

    def __init__(self, token_budget: int, *, ahead: bool = False, num_decode_steps: int = 0) -> None:
        self.budget_left = token_budget
        self.ahead = ahead
        self.num_decode_steps = num_decode_steps
        self.prompts: dict[Sequence, PlannedRow] = {}
        self.decodes: dict[Sequence, PlannedRow] = {}
        self.prompting: list[Sequence] | None = None  # running prompts; None: not collected yet
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.has_guesses = False  # rows were given guesses; they may have been dropped since
        self.is_short_of_blocks = False  # a running sequence was preempted to free blocks for another one
        self.recomputed: list[Sequence] = []
        self.leaving: dict[HostCopy, HostCopies] = {}
        self.returning: dict[HostCopy, HostCopies] = {}
        self.held_back = ""
        self.delayed = False

    @property
    def rows(self) -> tuple[PlannedRow, ...]:
        """The rows, prompt chunks first."""
        return (*self.prompts.values(), *self.decodes.values())

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds the next `num_tokens` tokens of a prompt. The chunk that completes the prompt samples a token."""
        sample = num_tokens == sequence.num_remaining and sequence.wants_token
        self.prompts[sequence] = PlannedRow(sequence, sequence.next_position, num_tokens, True, sample)
        self.budget_left -= num_tokens

    def add_decode(self, row: PlannedRow) -> None:
        """Adds the row of a decode."""
        self.decodes[row.sequence] = row
        self.budget_left -= 1

    def add_decodes(self, rows: Seq[PlannedRow], *, has_runs: bool = False) -> None:
        """Adds rows of decodes, without those of sequences that were preempted since. `has_runs`: some have several
        tokens."""
        if self.preempted:
            rows = [row for row in rows if row.sequence.state is SequenceState.RUNNING]
        if has_runs:
            # Runs come first: backends compute all rows up to the last one of several tokens as chunks of prompts.
            rows = sorted(rows, key=lambda row: row.num_computed == 1)
            self.budget_left -= sum(row.num_computed - 1 for row in rows)
        self.decodes |= {row.sequence: row for row in rows}
        self.budget_left -= len(rows)

    def preempt(self, sequence: Sequence) -> None:
        """Records a preempted sequence and drops its row."""
        self.drop_row(sequence)
        self.preempted.append(sequence)

    def drop_row(self, sequence: Sequence) -> None:
        """Drops a sequence's row, if it has one."""
        row = self.prompts.pop(sequence, None) or self.decodes.pop(sequence, None)
        if row is not None:
            self.budget_left += row.num_computed


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What a committed step brought one sequence.

    `token_ids`: its new tokens, from output index `index` on; none behind the one that ends it. `logprobs`: one entry
    for each of them if the sequence asks for log-probabilities, else none. `prefilled`: this was the step that
    completed the prompt's K/V. A search over forks brings no tokens. On a prefill worker it brings the `candidates`
    that follow the prompt, and at its end its `texts`.
    """

    sequence: Sequence
    index: int
    token_ids: Seq[int] = ()
    logprobs: Seq[TokenLogprobs] = ()
    prompt_logprobs: Seq[TokenLogprobs] = ()
    finish: FinishReason | None = None
    prefilled: bool = False
    candidates: Candidates | None = None
    texts: Seq[ScoredText] = ()


_PLACEHOLDER = np.zeros(1, np.int32)


def worker_batch(plan: StepPlan) -> WorkerBatch:
    """Converts a plan to what a forward needs, as views of the sequences' arrays."""
    rows, host = [_worker_row(row, jumps=row.sequence in plan.jumping) for row in plan.rows], plan.host_copies
    if host is None:
        return WorkerBatch(plan.step, rows, copies=plan.copies)
    return WorkerBatch(plan.step, rows, host.out, host.back, plan.copies)


def _candidates_wanted(sequence: Sequence) -> CandidatesWanted | None:
    if sequence.forks is None or not sequence.forks.num_candidates:
        return None
    history = sequence.tokens.view(0, sequence.num_tokens)
    return CandidatesWanted(sequence.forks.num_candidates, history, sequence.num_prompt)


def _worker_row(row: PlannedRow, *, jumps: bool) -> WorkerRow:
    sequence, position = row.sequence, row.position
    has_placeholder = position >= sequence.num_tokens  # planned ahead: the step in flight samples its token
    token_ids = _PLACEHOLDER if has_placeholder else sequence.tokens.view(position, position + row.num_tokens)
    if row.guesses is not None:
        token_ids = np.concatenate((token_ids, row.guesses))
    return WorkerRow(
        key=(sequence.fork_of or sequence).key,
        token_ids=token_ids,
        position=position,
        block_ids=sequence.table.ids,
        sample=row.sample,
        is_prefill=row.is_prefill,
        has_placeholder=has_placeholder,
        num_drafts=0 if row.guesses is None else len(row.guesses),
        jumps=jumps,
        wanted=_candidates_wanted(sequence),
    )
