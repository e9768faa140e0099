"""Stall-free batching under a token budget (Agrawal et al., Sarathi-Serve, OSDI 2024).

Each step holds every running decode first, then prompt chunks in what is left of the budget, so that the gap between
two tokens of a stream is bounded by one step of the budget, whatever the length of the prompts beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvrelay.engine.batch import SequenceKey, StepResult
from kvrelay.kv.pool import Owner
from kvrelay.protocol.sampling import FinishReason
from kvrelay.scheduling.blocks import BlockManager
from kvrelay.scheduling.plan import PlannedRow, SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`token_budget`: tokens a step may hold; `max_running`: sequences that hold blocks at a time."""

    token_budget: int
    max_running: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_running < 1:
            raise ValueError("token_budget and max_running must be at least 1")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"max_running ({self.max_running}) must not exceed token_budget ({self.token_budget}): each running "
                f"decode takes one token of every step"
            )


class SarathiScheduler:
    """First come, first served; decodes first; a decode that finds no block preempts the latest arrival."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: dict[SequenceKey, Sequence] = {}
        self.num_preemptions = 0
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._step = 0

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that is known already or that can never fit."""
        self._enter(sequence)
        self.waiting.append(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Takes over a sequence whose prompt's K/V is computed and whose blocks it holds as `running`."""
        self._enter(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        self.blocks.publish(sequence)

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output. One in a step in flight ends when that step is committed. Whether known."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if sequence.num_planned:
            sequence.abort_requested = True
        else:
            self._leave(sequence)
        return True

    def get(self, key: SequenceKey) -> Sequence | None:
        """A sequence that is waiting or running."""
        return self._sequences.get(key)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._sequences)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.key} is known already")
        self._sequences[sequence.key] = sequence

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.pop(sequence.key, None)
            self.blocks.free(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]

    # -- the decision -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step. To be followed by `commit` with its result before the next call."""
        budget = self.limits.token_budget
        decodes: list[PlannedRow] = []
        preempted: list[Sequence] = []
        for sequence in [s for s in self.running.values() if s.is_decoding]:
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, preempted):
                decodes.append(PlannedRow(sequence, sequence.num_computed, 1, is_prefill=False, sample=True))
        budget -= len(decodes)
        chunks: list[PlannedRow] = []
        for sequence in self.running.values():
            if budget > 0 and not sequence.is_decoding:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        admitted: list[Sequence] = []
        held_back = "" if self.waiting else "queue empty"
        while self.waiting and not held_back:
            held_back = "budget spent" if budget <= 0 else self._admit(self.waiting[0], preempted)
            if not held_back:
                sequence = self.waiting.popleft()
                admitted.append(sequence)
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        self._step += 1
        plan = StepPlan(self._step, (*chunks, *decodes), admitted, preempted, held_back)
        for row in plan.rows:
            row.sequence.num_planned = row.num_tokens
        return plan

    def _chunk(self, sequence: Sequence, budget: int) -> PlannedRow:
        num_tokens = min(sequence.num_remaining, budget)
        completes = num_tokens == sequence.num_remaining
        return PlannedRow(
            sequence, sequence.num_computed, num_tokens, is_prefill=True, sample=completes and sequence.wants_token
        )

    def _admit(self, sequence: Sequence, preempted: Iterable[Sequence]) -> str:
        """Admits a waiting sequence, or says why not."""
        if preempted:
            return "decodes were preempted in this step"
        if len(self.running) >= self.limits.max_running:
            return "max_running reached"
        if not self.blocks.admit(sequence, Owner.COMPUTING):
            return "no blocks"
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        return ""

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Gives a decode its next block, at the cost of the latest arrivals; False if it was preempted itself."""
        while not self.blocks.grow(sequence, sequence.num_computed + 1):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Recomputation: its output joins what there is to compute; published blocks may still be cached then."""
        del self.running[sequence.key]
        self.blocks.free(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    # -- the result ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Books a step's result; returns what is to be told about it. Finished sequences have left."""
        outputs = []
        for row, given in zip(plan.rows, result.rows, strict=True):
            sequence = row.sequence
            sequence.num_planned = 0
            sequence.num_computed += row.num_tokens
            if sequence.abort_requested:
                self._leave(sequence)
                continue
            self.blocks.publish(sequence)
            prefilled = row.is_prefill and sequence.num_remaining == 0
            index = sequence.num_output
            finish = None
            if given.token_id is not None:
                sequence.tokens.append(given.token_id)
                finish = self._finish(sequence, given.token_id)
            elif prefilled and not sequence.wants_token:
                finish = FinishReason.LENGTH
            if prefilled and not finish and sequence.owner is Owner.COMPUTING and not sequence.prefill_only:
                self.blocks.change_owner(sequence, Owner.RUNNING)
            if given.token_id is not None or given.prompt_logprobs or prefilled:
                outputs.append(
                    SequenceOutput(
                        sequence, index, given.token_id, given.logprobs, given.prompt_logprobs, finish, prefilled
                    )
                )
            if finish:
                self._leave(sequence)
        return outputs

    def fail_step(self, plan: StepPlan, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step could not be computed: the sequences with these keys leave (None: all of them). Returns them.

        The others are where they were before the step.
        """
        failed = []
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_planned = 0
            if keys is None or sequence.key in keys or sequence.abort_requested:
                self._leave(sequence)
                failed.append(sequence)
        return failed

    def _finish(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        ends = token_id in sampling.stop_token_ids or (
            not sampling.ignore_eos and token_id in self.limits.eos_token_ids
        )
        if ends:
            return FinishReason.STOP_TOKEN
        if sequence.num_output >= sampling.max_tokens or sequence.num_tokens >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None
