"""Planning as all schedulers share it: what a step holds, who is admitted, and who makes room.

A policy is a subclass that says in `fill` what goes into a step, out of the three parts below: running decodes, running
prompts, waiting prompts. Everything else is final here and in `books.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar, Self

from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.books import SchedulerBooks, accountable
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import NeedsCommit, PlanDraft, PlannedRow, StepPlan
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState


class BatchScheduler(SchedulerBooks):
    """See the module's text. Implements `Scheduler`."""

    block_manager: ClassVar[type[BlockManager]] = BlockManager
    mixes_prompts_and_decodes: ClassVar[bool] = False
    """Whether a sequence that comes back from the host decodes in the step that admits it."""

    @classmethod
    def build(cls, limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings) -> Self:
        """The scheduler with the block manager that belongs to it."""
        return cls(limits, cls.block_manager(pool, cache, limits.max_model_len), settings)

    # -- the policy ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def fill(self, draft: PlanDraft) -> None:
        """Puts into a step what belongs there."""

    # -- the decision -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step; a plan with rows is to be committed or failed before the next call."""
        if self._uncommitted:
            raise RuntimeError(f"step {self._uncommitted[0].step} is in flight: only schedule_ahead may plan behind it")
        self._refresh()
        draft = PlanDraft(self.limits.token_budget)
        self.fill(draft)
        return self._planned(draft)

    def schedule_ahead(self) -> StepPlan | None:
        """Plans the step behind the one in flight; None where that one must be committed first. Preempts nobody."""
        if len(self._uncommitted) != 1:
            raise RuntimeError(f"{len(self._uncommitted)} steps are in flight or planned, 1 can be planned behind")
        if any(row.num_lookahead or row.sequence.needs_commit_first for row in self._uncommitted[0].rows):
            return None
        self._refresh()
        draft = PlanDraft(self.limits.token_budget, ahead=True)
        try:
            self.fill(draft)
        except NeedsCommit:
            if not draft.admitted:  # else what is there makes a step: a policy need not come back to them
                return None
        if not draft.rows:
            self._admitted_ahead += draft.admitted
            return None
        return self._planned(draft)

    def reserve(self) -> Seq[Sequence]:
        """Admits handoffs between steps, as `schedule` does in one: as long as a handoff is next and there is room."""
        if self.waiting.num_remote:
            self.waiting.renew_probes()
            self.remote.refresh(self.running.values())
            self.admit_handoffs(PlanDraft(self.limits.token_budget, ahead=True))
        return self.remote.take_reservations()

    def _refresh(self) -> None:
        self.waiting.refresh()
        self.remote.refresh(self.running.values())

    def cancel_plan(self, plan: StepPlan) -> None:
        """A step that was planned ahead does not run: its sequences are where they were. Who was admitted stays."""
        if self._uncommitted[-1] is not plan:
            raise RuntimeError(f"step {plan.step} is not the last one planned")
        self._uncommitted.pop()
        if not self._uncommitted:
            self.blocks.step_landed()
        self.blocks.copies.cancelled(plan.copies)
        over = [row for row in plan.rows if self._row_is_over(row)]  # all of them first: beams leave together
        for sequence in dict.fromkeys(accountable(row) for row in over):
            if sequence.abort_requested and not sequence.num_planned:
                self._leave(sequence)

    def _planned(self, draft: PlanDraft) -> StepPlan:
        self._step += 1
        if self._admitted_ahead:
            still_here = [sequence for sequence in self._admitted_ahead if sequence.state is SequenceState.RUNNING]
            draft.admitted = [*still_here, *draft.admitted]
            self._admitted_ahead = []
        copies = self.blocks.copies.plan(_copy_targets(draft))
        swaps = self.swaps.seal(draft)
        plan = draft.finish(self._step, swaps, copies, self.remote.take_reservations())
        if self.prefill_gate is not None:
            self.prefill_gate.passed(len(self.running), len(plan.admitted) - len(draft.returning))
        for row in plan.rows:
            row.sequence.num_planned += row.num_tokens
            row.sequence.num_expected += row.sample
        if plan.has_work:
            self._uncommitted.append(plan)
        return plan

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence with a step in flight has one behind it, unless it draws a token that ends it."""
        if sequence.abort_requested:
            return False
        expected = sequence.num_expected
        return not expected or not (sequence.prefill_only or sequence.num_tokens + expected >= sequence.max_length)

    def plan_decodes(self, draft: PlanDraft) -> None:
        """A row for every running decode. A sequence that finds no free block preempts others, or is preempted."""
        rows: list[PlannedRow] = []
        short: list[Sequence] = []  # of a block
        looks_ahead = self.settings.num_lookahead > 0
        draft.prompting = prompting = []
        for sequence in self.running.values():
            is_beam = sequence.beams is not None
            if (is_beam or sequence.block_state is not BlockState.RUNNING) and not sequence.is_decoding:
                prompting.append(sequence)
                continue
            if sequence.num_planned and not self._goes_on(sequence):
                continue
            position = sequence.num_computed + sequence.num_planned
            num_lookahead = self._num_lookahead(sequence) if looks_ahead else 0
            rows.append(PlannedRow(sequence, position, 1, False, True, num_lookahead))
            if is_beam or position + num_lookahead >= sequence.table.capacity_tokens:
                short.append(sequence)
        if short and not looks_ahead:
            short = self.blocks.grow_each(short)
        for sequence in short:
            if sequence.state is SequenceState.RUNNING:
                num_tokens = sequence.next_position + 1 + self._num_lookahead(sequence)
                self._make_room(sequence, num_tokens, draft)
        draft.add_decodes(rows)

    def _num_lookahead(self, sequence: Sequence) -> int:
        """Tokens beyond one that its next decode row may bring: never behind its max_length, so that a sequence needs
        no more blocks than it does with one token a step."""
        if sequence.beams is not None:
            return 0
        num_tokens = sequence.num_tokens + sequence.num_expected
        return max(0, min(self.settings.num_lookahead, sequence.max_length - num_tokens - 1))

    def plan_prompts(self, draft: PlanDraft) -> None:
        """The next chunks of the prompts that hold blocks, in the order of their admission."""
        if draft.prompting is None:
            draft.prompting = [s for s in self.running.values() if not s.is_decoding]
        for sequence in draft.prompting:
            if not sequence.num_remaining or (sequence.num_planned and not self._goes_on(sequence)):
                continue
            if sequence.state is SequenceState.RUNNING:
                num_tokens = self._chunk_of(sequence, draft)
                num_tokens = self._room_for_chunk(sequence, num_tokens, draft)
                if not num_tokens:
                    return
                self._plan_chunk(sequence, num_tokens, draft)

    def admit_prompts(self, draft: PlanDraft, *, beyond_budget: bool = False) -> None:
        """Waiting prompts, in the queue's order, until one does not fit; nobody is skipped.

        With `beyond_budget` the budget holds up nobody's admission: what does not fit is computed in later steps.
        """
        while not draft.held_back:
            draft.held_back = self._admit_next(draft, beyond_budget)

    def admit_handoffs(self, draft: PlanDraft) -> None:
        """Waiting handoffs, in the queue's order, until a local prompt is next or one does not fit."""
        while self.waiting.num_remote and not self._admit_next(draft, beyond_budget=False, handoffs_only=True):
            pass

    def admit_rest_of_groups(self, draft: PlanDraft) -> None:
        """The samples whose groups were admitted, as far as their prompts are computed, whatever the budget."""
        while self.waiting.reserved_head() is not None and not self._admit_next(draft, beyond_budget=True):
            pass

    def _admit_next(self, draft: PlanDraft, beyond_budget: bool, *, handoffs_only: bool = False) -> str:
        """Admits the sequence whose turn it is, or says why not."""
        if draft.preempted:
            return "decodes were preempted in this step"
        if not self.waiting:
            return "queue empty"
        num_slots = self.num_slots
        if num_slots >= self.limits.max_running and not self.waiting.has_reserved:
            return "max_running reached"
        sequence = self.waiting.head()
        if sequence is None:
            return "its prefix is being computed or sent"
        if handoffs_only and sequence.remote is None:
            return "a local prompt is next"
        has_reserved_capacity = self.sample_groups.has_reserved_capacity(sequence) or self.remote.has_capacity(sequence)
        followers = self.group_capacity.of_followers(sequence)
        num_wanted = sequence.num_slots + len(followers) + self.remote.num_to_come(sequence)
        if not has_reserved_capacity and (reason := self._kept_out(sequence, num_slots, num_wanted, draft)):
            return reason
        if sequence.remote is not None:
            return "" if self.remote.reserve(sequence, self._handoff_headroom(sequence)) else "no blocks"
        if not has_reserved_capacity and len(group := self.sample_groups.lost_with(sequence)) > 1 and sequence in group:
            if self._admit_group(group, draft):
                return ""
            if self.running or self.remote.receiving:
                return "no room for the whole group"
            if draft.ahead:
                raise NeedsCommit
        if sequence.state is SequenceState.SWAPPED:
            return self._admit_swapped(sequence, draft, beyond_budget)
        position, num_tokens = self._first_chunk(sequence, draft)
        if not num_tokens and not beyond_budget:
            return "budget spent"
        if not self._give_blocks(sequence, position + num_tokens, followers):
            return "no blocks for the whole group" if followers else "no blocks"
        self._admitted(sequence)
        draft.admitted.append(sequence)
        self._reserve(followers)
        if num_tokens:
            self._plan_chunk(sequence, num_tokens, draft)
        return ""

    def _kept_out(self, sequence: Sequence, num_slots: int, num_wanted: int, draft: PlanDraft) -> str:
        """Why one for whom no room is set aside waits, whatever blocks there are: for `num_wanted` more running
        sequences, for what goes first, or for others' prompts."""
        max_running = self.limits.max_running
        if num_slots + num_wanted > max_running:
            is_full = num_slots >= max_running
            return "max_running reached" if is_full else "max_running leaves no room for all its samples or beams"
        if self.prefill_gate is None or sequence.state is SequenceState.SWAPPED or sequence.remote is not None:
            return ""
        reason = self.prefill_gate.ask(len(self.running), self._kv_usage)
        draft.delayed = draft.delayed or bool(reason)
        return reason

    def _handoff_headroom(self, sequence: Sequence) -> int:
        """Blocks that must stay available besides a handoff's own: a sequence whose KV arrives cannot be preempted."""
        headroom = 0 if self.remote.has_capacity(sequence) else self.num_reserved_blocks
        if sequence.beams is not None:
            headroom += sequence.beams.num_reserved_blocks()
        if self.running or self.remote.receiving:
            # A block for each that runs: else one that grows would preempt another at once. More if more is expected.
            expected = self.new_token_ratio.headroom(self.running.values(), self.blocks)
            headroom += max(len(self.running) + 1, expected)
        return headroom

    def _first_chunk(self, sequence: Sequence, draft: PlanDraft) -> tuple[int, int]:
        """Where a waiting sequence would start, and the tokens of its first chunk."""
        position = self.blocks.num_cached_blocks(sequence) * self.blocks.pool.block_size
        return position, self.chunks.size(sequence.num_tokens - position, position, draft)

    def _chunk_of(self, sequence: Sequence, draft: PlanDraft) -> int:
        """Tokens of the next chunk."""
        return self.chunks.size(sequence.num_remaining, sequence.next_position, draft)

    def _admit_swapped(self, sequence: Sequence, draft: PlanDraft, beyond_budget: bool) -> str:
        """As above, for one whose K/V comes back from the host: it goes on where it was. Not while a step is in flight:
        what is copied when is for one step at a time to say. Without room nothing is to be said, and steps go on."""
        position = self.swaps.num_tokens(sequence)
        if draft.ahead:
            if self.blocks.num_missing(sequence, position) + self.num_headroom_blocks > self.blocks.num_available:
                return "no blocks"
            raise NeedsCommit
        num_remaining = sequence.num_tokens - position
        decodes = num_remaining == 1 and sequence.num_output > 0
        num_tokens = min(1, max(0, draft.budget_left)) if decodes else self.chunks.size(num_remaining, position, draft)
        if not num_tokens and not beyond_budget:
            return "budget spent"
        if not self.swaps.resume(sequence, num_tokens, self.num_headroom_blocks, draft):
            return "no blocks"
        self._admitted(sequence)
        draft.admitted.append(sequence)
        if not decodes and num_tokens:
            self._plan_chunk(sequence, num_tokens, draft)
        elif num_tokens and self.mixes_prompts_and_decodes:
            draft.add_decode(PlannedRow(sequence, position, 1, False, True))
        return ""

    def _admit_group(self, group: Seq[Sequence], draft: PlanDraft) -> bool:
        """Those that come back: all of them, whatever the budget, or nobody. Not while a step is in flight, as one that
        is swapped. Where the first computes what others lack, too, these are reserved."""
        back = self.group_capacity.of_return(group)
        num_blocks = back.num_blocks + self.num_headroom_blocks
        if self.num_slots + len(group) > self.limits.max_running or num_blocks > self.blocks.num_available:
            return False
        # What they find cached is available as well, until they hold it.
        if num_blocks + self.group_capacity.num_evictable(back.given) > self.blocks.num_available:
            return False
        if draft.ahead:
            raise NeedsCommit
        for index, sequence in enumerate(back.given):
            if not self._give_all_blocks(sequence, draft, sum(back.reserved.values())):
                for before in reversed(back.given[:index]):
                    self.swaps.undo(before, draft)
                    self.blocks.free(before)
                return False
        for sequence in back.given:
            self._admitted(sequence)
            draft.admitted.append(sequence)
            if sequence.is_decoding:
                if self.mixes_prompts_and_decodes and draft.budget_left > 0:
                    draft.add_decode(PlannedRow(sequence, sequence.num_computed, 1, False, True))
            elif num_tokens := self._chunk_of(sequence, draft):
                self._plan_chunk(sequence, num_tokens, draft)
        self._reserve(back.reserved)
        return True

    def _reserve(self, reservations: Mapping[Sequence, int]) -> None:
        for sequence, num_blocks in reservations.items():
            self.sample_groups.reserve(sequence, num_blocks)
            self.waiting.reserve(sequence)

    def _give_all_blocks(self, sequence: Sequence, draft: PlanDraft, num_reserved: int) -> bool:
        """Blocks for all known tokens of a sequence that comes back, swapped or not; `num_reserved` besides."""
        headroom = self.num_headroom_blocks + num_reserved
        if sequence.state is SequenceState.SWAPPED:
            num_next = sequence.num_tokens - self.swaps.num_tokens(sequence)
            return self.swaps.resume(sequence, num_next, headroom, draft)
        return self.blocks.admit(sequence, BlockState.COMPUTING, num_next=sequence.num_tokens, headroom=headroom)

    @property
    def _kv_usage(self) -> float:
        """Share of the pool that cannot be had."""
        pool = self.blocks.pool
        return 1 - pool.num_available / pool.num_blocks

    def _give_blocks(self, sequence: Sequence, num_next: int, followers: Mapping[Sequence, int]) -> bool:
        """Admission as SGLang's paper has it: free and evictable blocks must hold the part that is not cached, and what
        the running sequences are expected to take. A refusal stands until blocks come back.
        """
        available = self.blocks.num_available
        headroom = 0 if self.sample_groups.has_reserved_capacity(sequence) else self.num_headroom_blocks
        headroom += sum(followers.values())
        if sequence.beams is not None:
            headroom += sequence.beams.num_reserved_blocks()
        if self._refused is not None:
            key, available_then, headroom_then = self._refused
            if key == sequence.key and available <= available_then and headroom >= headroom_then:
                return False
        admitted = self.blocks.admit(sequence, BlockState.COMPUTING, num_next=num_next, headroom=headroom)
        self._refused = None if admitted else (sequence.key, available, headroom)
        return admitted

    def _admitted(self, sequence: Sequence) -> None:
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        self.swaps.resumed(sequence)
        self.waiting.admitted(sequence)
        self.sample_groups.settle(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        if sequence.beams is not None:
            self.beams.admitted(sequence.beams)
        if self.blocks.shares_prefixes:
            hashes = sequence.block_hashes(sequence.num_full_blocks)
            self.in_progress.promise(sequence.key, hashes[sequence.num_published :])

    def _plan_chunk(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> None:
        completes = num_tokens == sequence.num_remaining
        sample = completes and sequence.wants_token
        draft.add_chunk(PlannedRow(sequence, sequence.next_position, num_tokens, True, sample))

    # -- room ---------------------------------------------------------------------------------------------------------

    def _room_for_chunk(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> int:
        """The chunk shrinks to the blocks there are; where there are none, others make room for its first token."""
        table, position = sequence.table, sequence.next_position
        available = self.blocks.num_available * table.block_size
        room = table.capacity_tokens + available - position
        num_tokens = min(num_tokens, max(room, 1))
        return num_tokens if self._make_room(sequence, position + num_tokens, draft) else 0

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Blocks for `num_tokens` tokens, at the cost of others; False if the sequence was preempted itself."""
        while not self.blocks.grow(sequence, num_tokens):
            if draft.ahead:
                raise NeedsCommit
            latest = self._victim()
            for reserved in reversed(self.sample_groups.lose_reserved(latest)):
                self.waiting.remove(reserved)
                self.waiting.resume(reserved)
            for victim in reversed(self.sample_groups.running_with(latest)):
                self._preempt(victim, draft)
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def _victim(self) -> Sequence:
        """Who goes: the latest that got blocks; or the one with the least output, the latest of those."""
        latest_first = reversed(self.running.values())
        if self.settings.retraction == "latest":
            return next(latest_first)
        return min(latest_first, key=lambda sequence: sequence.num_output)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Its K/V goes to the host, or is computed again: then its output joins what there is to compute, and what it
        published may still be cached. Beams go all together; what they have in common is computed again."""
        is_swapped = False
        if sequence.beams is not None:
            sequence = sequence.beams.leader
            self._preempt_beams(sequence, draft)
        elif self.swaps.undo(sequence, draft):
            draft.preempt(sequence)
            self._requeue_swapped(sequence)
            return
        else:
            is_swapped = self.swaps.preempt(sequence, draft)
            self._lose_blocks(sequence)
        draft.preempt(sequence)
        sequence.state = SequenceState.SWAPPED if is_swapped else SequenceState.WAITING
        if not is_swapped:
            draft.recomputed.append(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.resume(sequence)
        self.new_token_ratio.retracted(self.running.values())

    def _preempt_beams(self, leader: Sequence, draft: PlanDraft) -> None:
        assert leader.beams is not None
        self.beams.preempt(leader.beams, draft.drop_row)
        self.waiting.prefixes_changed(self.in_progress.withdraw(leader.key))


def _copy_targets(draft: PlanDraft) -> Iterator[int]:
    """The blocks that beams write into in a step."""
    for row in draft.rows:
        if row.sequence.beams is not None:
            table, end = row.sequence.table, row.position + row.num_tokens
            first, stop = row.position // table.block_size, blocks_for(end, table.block_size)
            # All of them: a prompt whose step failed is computed again up to a block that was to be copied behind it.
            yield from table.ids[first:stop].tolist()
