"""Planning of a step out of the parts that policies combine: decodes, chunks of running prompts, new sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.chunk_sizes import Chunks
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import PlanBuilder, PlannedRow
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.sequence_admission import SequenceAdmission

GUESSES_PART = 4
"""The part of the token budget that guesses take, at most, while prompts run or wait."""


class StepPlanner:
    """Puts rows into the plan of a step. A policy calls these methods in its order of preference."""

    def __init__(
        self,
        lifecycle: SequenceLifecycle,
        admission: SequenceAdmission,
        chunks: Chunks,
        *,
        pipeline_depth: int = 1,
    ) -> None:
        """`pipeline_depth`: parts of the model's pipeline. With several, decodes are divided into as many groups, whose
        steps are in flight at the same time."""
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._blocks = lifecycle.blocks
        self._shares = lifecycle.shares
        self._admission = admission
        self._chunks = chunks
        self._forced_tokens = lifecycle.forced
        self._pipeline_depth = pipeline_depth

    @property
    def running(self) -> Mapping[SequenceKey, Sequence]:
        """Sequences that hold blocks, in the order of their admission."""
        return self._running

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences in the queue."""
        return self._waiting

    # -- running sequences --------------------------------------------------------------------------------------------

    def plan_decodes(self, builder: PlanBuilder) -> None:
        """Adds a row for every running decode. A sequence that finds no free block preempts others, or is preempted.

        A row holds one token, behind it the tokens that a grammar forced, as far as the step has room for them, and
        guesses behind these.
        """
        rows: list[PlannedRow] = []
        short: list[Sequence] = []  # sequences that need a block
        jumping: list[int] = []  # rows with forced tokens
        has_others = False  # rows that never have any
        speculating: list[int] = []  # rows that may have guesses
        builder.prompting = prompting = []
        guessed, can_jump = self._lifecycle.speculator.sequences, self._forced_tokens.jumping
        most_rows = self._most_decodes(builder)
        for sequence in self._running.values():
            is_fork = sequence.forks is not None
            if (is_fork or sequence.block_state is not BlockState.RUNNING) and not sequence.is_decoding:
                prompting.append(sequence)
                continue
            if sequence.num_planned and not self._goes_on(sequence):
                continue
            if len(rows) >= most_rows and not is_fork:  # forks advance together
                continue
            position = sequence.num_computed + sequence.num_planned
            rows.append(PlannedRow(sequence, position, 1, False, True))
            if sequence in guessed:
                speculating.append(len(rows) - 1)
            if is_fork or position >= sequence.table.capacity_tokens:
                short.append(sequence)
            if sequence not in can_jump:
                has_others = True
            elif sequence.num_remaining > 1:
                jumping.append(len(rows) - 1)
        runs: dict[Sequence, int] = {}
        if jumping:
            sizes = {"budget_left": builder.budget_left, "num_running": len(self._running)}
            runs = self._forced_tokens.add_runs(jumping, rows, **sizes, has_others=has_others)
        if short:
            short = self._blocks.grow_each(short)
        for sequence in dict.fromkeys((*short, *runs)):
            if sequence.state is SequenceState.RUNNING:
                self._lifecycle.make_room(sequence, sequence.next_position + runs.get(sequence, 1), builder)
        # What follows tokens of a step in flight cannot be guessed yet: `schedule_ahead` waits for these if it matters.
        if speculating and (not builder.ahead or self._pipeline_depth > 1):
            builder.has_guesses = self._add_guesses(speculating, rows, builder)
        builder.add_decodes(rows, has_runs=builder.has_guesses or bool(runs))

    def _most_decodes(self, builder: PlanBuilder) -> int:
        """The decodes of a step: with a pipeline an equal share for each of its parts, in as many steps at most. More
        and smaller groups would read the weights more often."""
        if self._pipeline_depth == 1:
            return 1 << 30
        if builder.num_decode_steps >= self._pipeline_depth:
            return 0
        num_decodes = sum(not sequence.is_prompting for sequence in self._running.values())
        return -(-num_decodes // self._pipeline_depth)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Returns whether a sequence in a step in flight gets a row in the next one. With a pipeline only if its tokens
        are known, so that no rank waits for the last one. A stop token may still end it."""
        if sequence.abort_requested or self._forced_tokens.is_behind(sequence):
            return False
        expected = sequence.num_expected
        if not expected:
            return True
        is_last = sequence.prefill_only or sequence.num_tokens + expected >= sequence.max_length
        return not is_last and self._pipeline_depth == 1

    def _add_guesses(self, places: Seq[int], rows: list[PlannedRow], builder: PlanBuilder) -> bool:
        """Adds guesses to some of the rows. Returns whether there are any.

        Guesses take what is left of the token budget beside one token for each running sequence, or a part of it if
        prompts are to be computed, so no prompt waits for their end.
        """
        num_spare = builder.budget_left - len(self._running) - sum(row.num_tokens - 1 for row in rows)
        if builder.prompting or len(self._waiting) > self._waiting.num_remote:
            num_spare = min(num_spare, builder.budget_left // GUESSES_PART)
        num_kept = len(rows) + self._lifecycle.num_reserved_blocks
        return self._lifecycle.speculator.add_guesses(
            places, rows, self._blocks, num_spare=num_spare, num_kept=num_kept
        )

    def plan_prompts(self, builder: PlanBuilder) -> None:
        """Adds the next chunks of running prompts, those of the owner that was served least first, and those of an
        owner in the order of their admission."""
        if builder.prompting is None:
            builder.prompting = [s for s in self._running.values() if s.is_prompting]
        if self._shares.is_contested:
            builder.prompting.sort(key=self._shares.counter)
        self._plan_chunks(builder.prompting, builder)

    def _plan_chunks(self, prompting: Iterable[Sequence], builder: PlanBuilder) -> None:
        """Adds the next chunk of each sequence, until the budget is used."""
        for sequence in prompting:
            num_remaining = self._blocks.num_before_stop(sequence)
            if not num_remaining or (sequence.num_planned and not self._goes_on(sequence)):
                continue
            if sequence.state is SequenceState.RUNNING:
                num_tokens = self._chunks.size(num_remaining, sequence.next_position, builder)
                num_tokens = self._room_for_chunk(sequence, num_tokens, builder)
                if not num_tokens:
                    return
                builder.add_chunk(sequence, num_tokens)

    def _room_for_chunk(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> int:
        """Returns how many tokens of the chunk get blocks: as many as fit, and by preemption at least one."""
        table, position = sequence.table, sequence.next_position
        num_available_tokens = self._blocks.num_available * table.block_size
        room = table.capacity_tokens + num_available_tokens - position
        num_tokens = min(num_tokens, max(room, 1))
        return num_tokens if self._lifecycle.make_room(sequence, position + num_tokens, builder) else 0

    # -- waiting sequences --------------------------------------------------------------------------------------------

    def admit_prompts(self, builder: PlanBuilder, *, beyond_budget: bool = False) -> None:
        """Admits waiting sequences in the queue's order, until one does not fit.

        With `beyond_budget` sequences are admitted even if no budget is left; later steps compute their prompts.
        """
        while not builder.held_back:
            builder.held_back = self._admission.admit_next(builder, beyond_budget=beyond_budget)

    def admit_neglected(self, builder: PlanBuilder) -> None:
        """Admits waiting sequences before the next chunks of running prompts whose owners were served more, so that
        they do not wait for the rest of a long prompt. Call it after `plan_decodes` and before `plan_prompts`."""
        prompting, counter = builder.prompting, self._shares.counter
        if not self._shares.is_contested or not prompting:
            return
        prompting.sort(key=counter)
        while prompting and not builder.held_back and (head := self._waiting.head()) is not None:
            num_ahead = bisect_right(prompting, counter(head), key=counter)
            if num_ahead == len(prompting):
                return
            self._plan_chunks(prompting[:num_ahead], builder)
            del prompting[:num_ahead]
            builder.held_back = self._admission.admit_next(builder)

    def admit_handoffs(self, builder: PlanBuilder) -> None:
        """Admits waiting handoffs in the queue's order, until a local prompt is next or one does not fit."""
        while self._waiting.num_remote and not self._admission.admit_next(builder, handoffs_only=True):
            pass

    def admit_rest_of_groups(self, builder: PlanBuilder) -> None:
        """Admits samples with reserved capacity whose prompt is computed, even if no budget is left."""
        while self._waiting.reserved_head() is not None and not self._admission.admit_next(builder, beyond_budget=True):
            pass
