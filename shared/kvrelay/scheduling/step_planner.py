"""Planning of a step out of the parts that policies combine: decodes, chunks of running prompts, new sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import PlanDraft, PlannedRow
from kvrelay.scheduling.policies.chunk_sizes import MIN_CHUNK, Chunks
from kvrelay.scheduling.preemptor import Preemptor
from kvrelay.scheduling.queue.decode_turns import DecodeTurns
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.sequence_admission import SequenceAdmission

SHARED_STEP_PART = 4
"""The part of the token budget that a short step has on a prefill worker, if it is more than `PREFILL_SHORT_STEP`."""

MAX_PAUSED_STEPS = 2
"""Steps in a row in which decodes may be paused for prompts of tenants that were served less."""

RUNS_PART = 8
"""The part of the token budget that forced tokens take, at most, if unconstrained rows share the step and the settings
name no number."""

DRAFTS_PART = 4
"""The part of the token budget that drafts take, at most, while prompts run or wait."""


class StepPlanner:
    """Puts rows into the draft of a step. A policy calls these methods in its order of preference."""

    def __init__(
        self,
        lifecycle: SequenceLifecycle,
        admission: SequenceAdmission,
        preemptor: Preemptor,
        chunks: Chunks,
        turns: DecodeTurns,
        *,
        max_shared_forced_tokens: int | None = None,
        num_stages: int = 1,
    ) -> None:
        """`max_shared_forced_tokens`: see `SchedulerSettings`. `num_stages`: stages of the model's pipeline. With
        several, decodes are divided into as many groups, whose steps are in flight at the same time."""
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._blocks = lifecycle.blocks
        self._shares = lifecycle.shares
        self._admission = admission
        self._preemptor = preemptor
        self._chunks = chunks
        self._turns = turns
        self._max_shared_forced_tokens = max_shared_forced_tokens
        self._num_stages = num_stages
        self._has_paused = False  # decodes, in the latest step
        self._num_paused_steps = 0  # consecutive ones

    @property
    def running(self) -> Mapping[SequenceKey, Sequence]:
        """Sequences that hold blocks, in the order of their admission."""
        return self._running

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences in the queue."""
        return self._waiting

    def _counter(self, sequence: Sequence) -> float:
        return self._shares.counter(sequence.tenant)

    # -- running sequences --------------------------------------------------------------------------------------------

    def plan_decodes(self, draft: PlanDraft) -> None:
        """Adds a row for every running decode. A sequence that finds no free block preempts others, or is preempted.

        A row holds one token, behind it the tokens that a grammar forced, as far as the step has room for them, and
        drafts behind these.
        """
        self._num_paused_steps = self._num_paused_steps + 1 if self._has_paused else 0
        self._has_paused = False
        rows: list[PlannedRow] = []
        short: list[Sequence] = []  # sequences that need a block
        jumping: list[int] = []  # rows with forced tokens
        has_others = False  # rows that never have any
        speculating: list[int] = []  # rows that may have drafts
        draft.prompting = prompting = []
        self._turns.plan_step(self._running.values())
        resting = self._turns.resting
        most_rows = self._most_decodes(draft)
        for sequence in self._running.values():
            is_beam = sequence.beams is not None
            if (is_beam or sequence.block_state is not BlockState.RUNNING) and not sequence.is_decoding:
                prompting.append(sequence)
                continue
            if sequence in resting or (sequence.num_planned and not self._goes_on(sequence)):
                continue
            if len(rows) >= most_rows and not is_beam:  # beams advance together
                continue
            position = sequence.num_computed + sequence.num_planned
            rows.append(PlannedRow(sequence, position, 1, False, True))
            if sequence.drafts is not None:
                speculating.append(len(rows) - 1)
            if is_beam or position >= sequence.table.capacity_tokens:
                short.append(sequence)
            if not sequence.jumps:
                has_others = True
            elif sequence.num_remaining > 1:
                jumping.append(len(rows) - 1)
        runs = self._plan_runs(jumping, rows, draft, has_others=has_others) if jumping else {}
        if short:
            short = self._blocks.grow_each(short)
        for sequence in dict.fromkeys((*short, *runs)):
            if sequence.state is SequenceState.RUNNING:
                self._preemptor.make_room(sequence, sequence.next_position + runs.get(sequence, 1), draft)
        # What follows tokens of a step in flight cannot be guessed yet: `schedule_ahead` waits for these if it matters.
        if speculating and (not draft.ahead or self._num_stages > 1):
            draft.has_drafts = self._add_drafts(speculating, rows, draft)
        draft.add_decodes(rows, has_runs=draft.has_drafts or bool(runs))
        if self._turns.is_probe:
            draft.budget_left = 0  # nor prompts: they are all of the tenant whose decodes rest

    def _most_decodes(self, draft: PlanDraft) -> int:
        """The decodes of a step: with a pipeline an equal part of them for each stage, in as many steps at most. More
        and smaller groups would read the weights more often."""
        if self._num_stages == 1:
            return 1 << 30
        if draft.num_decode_steps >= self._num_stages:
            return 0
        num_decodes = sum(not sequence.is_prompting for sequence in self._running.values())
        return -(-num_decodes // self._num_stages)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Returns whether a sequence in a step in flight gets a row in the next one. With a pipeline only if its tokens
        are known, so that no stage waits for the last one. A stop token may still end it."""
        return _continues(sequence) and not (self._num_stages > 1 and sequence.num_expected)

    def _plan_runs(
        self, places: Seq[int], rows: list[PlannedRow], draft: PlanDraft, *, has_others: bool
    ) -> dict[Sequence, int]:
        """Adds forced tokens to rows. Returns the number of tokens of these rows.

        Forced tokens take what is left of the token budget beside one token for each running sequence, and at most a
        part of it if unconstrained rows share the step. The rest of a run follows in the next steps.
        """
        num_spare = draft.budget_left - len(self._running)
        if has_others:
            most = self._max_shared_forced_tokens
            num_spare = min(num_spare, draft.budget_left // RUNS_PART if most is None else most)
        runs: dict[Sequence, int] = {}
        for place in places:
            row, num_remaining = rows[place], rows[place].sequence.num_remaining
            runs[row.sequence] = num_tokens = min(num_remaining, 1 + max(0, num_spare))
            rows[place] = PlannedRow(row.sequence, row.position, num_tokens, False, num_tokens == num_remaining)
            num_spare -= num_tokens - 1
        return runs

    def _add_drafts(self, places: Seq[int], rows: list[PlannedRow], draft: PlanDraft) -> bool:
        """Adds drafts to some of the rows. Returns whether there are any.

        Drafts take what is left of the token budget beside one token for each running sequence, or a part of it if
        prompts are to be computed, and of the blocks beside reserved ones and one for each row. So they preempt no
        sequence, and no prompt waits for their end. None is beyond its sequence's max_length, so a sequence needs no
        more blocks than with one token per step.
        """
        drafter, blocks, num_drafts = self._lifecycle.drafter, self._blocks, 0
        num_tokens = sum(row.num_tokens for row in rows)
        num_spare = draft.budget_left - len(self._running) - num_tokens + len(rows)
        if draft.prompting or len(self._waiting) > self._waiting.num_remote:
            num_spare = min(num_spare, draft.budget_left // DRAFTS_PART)
        num_kept = len(rows) + self._lifecycle.num_reserved_blocks
        drafter.begin_step(len(rows), num_tokens)
        for place in places:
            row, sequence = rows[place], rows[place].sequence
            if not row.sample or sequence.state is not SequenceState.RUNNING:
                continue
            table, end = sequence.table, row.position + row.num_tokens
            num_slots = table.capacity_tokens + max(0, blocks.num_available - num_kept) * table.block_size - end
            most = min(num_spare - num_drafts, num_slots, sequence.max_length - end - 1)
            drafts = drafter.draft(sequence, most)
            if drafts is not None and blocks.grow(sequence, end + len(drafts)):
                rows[place] = PlannedRow(sequence, row.position, row.num_tokens, False, True, drafts)
                num_drafts += len(drafts)
        return num_drafts > 0

    def plan_prompts(self, draft: PlanDraft) -> None:
        """Adds the next chunks of running prompts, those of the tenant that was served least first, and those of a
        tenant in the order of their admission."""
        if draft.prompting is None:
            draft.prompting = [s for s in self._running.values() if s.is_prompting]
        if self._shares.is_contested:
            draft.prompting.sort(key=self._counter)
        self._plan_chunks(draft.prompting, draft)

    def _plan_chunks(self, prompting: Iterable[Sequence], draft: PlanDraft) -> None:
        """Adds the next chunk of each sequence, until the budget is used."""
        for sequence in prompting:
            num_remaining = sequence.num_before_stop
            if not num_remaining or (sequence.num_planned and not self._goes_on(sequence)):
                continue
            if sequence.state is SequenceState.RUNNING:
                self._leave_room_for_light_tenants(sequence, draft)
                paused = self._pause_decodes_of_others(sequence, draft)
                num_tokens = self._chunks.size(num_remaining, sequence.next_position, draft)
                num_tokens = self._room_for_chunk(sequence, num_tokens, draft)
                if num_tokens:
                    draft.add_chunk(sequence, num_tokens)
                self._return_paused(sequence, paused, draft)
                if not num_tokens:
                    return

    def _room_for_chunk(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> int:
        """Returns how many tokens of the chunk get blocks: as many as fit, and by preemption at least one."""
        table, position = sequence.table, sequence.next_position
        num_available_tokens = self._blocks.num_available * table.block_size
        room = table.capacity_tokens + num_available_tokens - position
        num_tokens = min(num_tokens, max(room, 1))
        return num_tokens if self._preemptor.make_room(sequence, position + num_tokens, draft) else 0

    # -- waiting sequences --------------------------------------------------------------------------------------------

    def admit_prompts(self, draft: PlanDraft, *, beyond_budget: bool = False) -> None:
        """Admits waiting sequences in the queue's order, until one does not fit.

        With `beyond_budget` sequences are admitted even if no budget is left; later steps compute their prompts.
        """
        while not draft.held_back:
            draft.held_back = self._admit_next(draft, beyond_budget=beyond_budget)

    def _admit_next(self, draft: PlanDraft, *, beyond_budget: bool = False) -> str:
        if not self._shares.is_contested and not self._shares.has_recent_tenant:
            return self._admission.admit_next(draft, beyond_budget=beyond_budget)
        paused: Seq[PlannedRow] = ()
        if (head := self._waiting.head()) is not None and head.remote is None:
            self._leave_room_for_light_tenants(head, draft)
            paused = self._pause_decodes_of_others(head, draft)
        reason = self._admission.admit_next(draft, beyond_budget=beyond_budget)
        if reason and self._admission.reclaim(draft):
            reason = self._admission.admit_next(draft, beyond_budget=beyond_budget)
        if head is not None:
            self._return_paused(head, paused, draft)
        return reason

    def _leave_room_for_light_tenants(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Prompt tokens of `sequence` are next. They make the step longer for light tenants: those that were served
        less, and have nothing waiting. If there is one, the prompts of others get what its own leave of a short step.
        Also if a tenant was here lately, since its next request waits for the rest of the step: on a prefill worker
        within `RECENT_TURNS`, on others within `RETURN_STEPS`."""
        shares, tenant = self._shares, sequence.tenant
        may_come_back = shares.has_recent_tenant if sequence.prefill_only else shares.may_return_to(tenant)
        if draft.is_shortened or not (may_come_back or shares.is_contested):
            return
        num_uncharged = 0 if sequence.state is SequenceState.RUNNING else sequence.num_tokens
        if shares.is_behind(tenant, num_uncharged) or not (may_come_back or shares.has_light_tenant_beside(tenant)):
            return
        draft.is_shortened = True
        if sequence.prefill_only:
            num_tokens = max(shares.prefill_short_step, self._lifecycle.limits.token_budget // SHARED_STEP_PART)
        else:
            num_tokens = shares.decode_short_step - sum(each.tenant == tenant for each in draft.decodes)
        num_tokens = max(MIN_CHUNK, num_tokens)
        rest = max(0, num_tokens - sum(row.num_tokens for row in draft.prompts.values()))
        draft.budget_left = min(draft.budget_left, rest)

    def _pause_decodes_of_others(self, sequence: Sequence, draft: PlanDraft) -> list[PlannedRow]:
        """The prompt of `sequence` is next. Decodes of tenants that were served more and have more sequences leave the
        step as far as the prompt needs the token budget, so it takes as many steps as alone. Returns their rows.

        In at most `MAX_PAUSED_STEPS` steps in a row, however long the prompt is. Rows of beams remain, because beams
        advance together, and rows of several tokens, because they must come first.
        """
        shares = self._shares
        if not shares.is_contested or not draft.decodes or self._num_paused_steps >= MAX_PAUSED_STEPS:
            return []
        is_running = sequence.state is SequenceState.RUNNING
        num_remaining = sequence.num_remaining if is_running else sequence.num_tokens
        num_lacking = min(num_remaining, self._lifecycle.limits.token_budget) - draft.budget_left
        if num_lacking <= 0 or draft.is_shortened:
            return []
        heavier = shares.heavier_after(sequence.tenant, 0 if is_running else num_remaining)
        pausable = [
            row
            for each, row in draft.decodes.items()
            if each.tenant in heavier and row.num_computed == 1 and each.beams is None
        ]
        paused = pausable[-num_lacking:]
        for row in paused:
            draft.drop_row(row.sequence)
        return paused

    def _return_paused(self, sequence: Sequence, paused: Seq[PlannedRow], draft: PlanDraft) -> None:
        """Decodes were paused for a prompt: they return to the step if it got no chunk of the prompt."""
        if not paused:
            return
        if sequence in draft.prompts:
            self._has_paused = True
        else:
            draft.add_decodes([row for row in paused if row.sequence.state is SequenceState.RUNNING])

    def admit_neglected(self, draft: PlanDraft) -> None:
        """Admits waiting sequences before the next chunks of running prompts whose tenants were served more, so that
        they do not wait for the rest of a long prompt. Call it after `plan_decodes` and before `plan_prompts`."""
        prompting = draft.prompting
        if not self._shares.is_contested or not prompting:
            return
        prompting.sort(key=self._counter)
        while prompting and not draft.held_back:
            head = self._waiting.head()
            if head is None:
                return
            num_ahead = bisect_right(prompting, self._counter(head), key=self._counter)
            if num_ahead == len(prompting):
                return
            self._plan_chunks(prompting[:num_ahead], draft)
            del prompting[:num_ahead]
            draft.held_back = self._admit_next(draft)

    def admit_handoffs(self, draft: PlanDraft) -> None:
        """Admits waiting handoffs in the queue's order, until a local prompt is next or one does not fit."""
        while self._waiting.num_remote and not self._admission.admit_next(draft, handoffs_only=True):
            pass

    def admit_rest_of_groups(self, draft: PlanDraft) -> None:
        """Admits samples with reserved capacity whose prompt is computed, even if no budget is left."""
        while self._waiting.reserved_head() is not None and not self._admission.admit_next(draft, beyond_budget=True):
            pass


def _continues(sequence: Sequence) -> bool:
    """Returns whether a sequence in the step in flight gets a row in the next one. A stop token may still end it."""
    if sequence.abort_requested or sequence.is_behind:
        return False
    expected = sequence.num_expected
    return not expected or not (sequence.prefill_only or sequence.num_tokens + expected >= sequence.max_length)
