"""The bookkeeping that all schedulers share: who is here, who holds blocks, what a step's result means.

A policy is a subclass that says in `fill` what goes into a step, out of the three parts below: running decodes, running
prompts, waiting prompts. Everything else is final here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from typing import ClassVar, Self

from kvrelay.engine.batch import Candidates, RowResult, SequenceKey, StepResult
from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import FinishReason
from kvrelay.scheduling.admission import NewTokenRatio
from kvrelay.scheduling.base import AdmissionGate, PrefillGate, SchedulerLimits, SchedulerSettings, SwapUse
from kvrelay.scheduling.beams import BeamGroup, BeamGroups
from kvrelay.scheduling.blocks import BlockManager
from kvrelay.scheduling.chunks import Chunks
from kvrelay.scheduling.cost import StepCost
from kvrelay.scheduling.gangs import Gangs
from kvrelay.scheduling.orders import ORDERS
from kvrelay.scheduling.plan import NeedsCommit, PlanDraft, PlannedRow, SequenceOutput, StepPlan
from kvrelay.scheduling.prefixes import PrefixesInProgress
from kvrelay.scheduling.queue import WaitingQueue
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.swapping import Swapper

DEFAULT_SETTINGS = SchedulerSettings()


class BatchScheduler(ABC):
    """See the module's text. Implements `Scheduler`."""

    block_manager: ClassVar[type[BlockManager]] = BlockManager
    mixes_prompts_and_decodes: ClassVar[bool] = False
    """Whether a sequence that comes back from the host decodes in the step that admits it."""

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, settings: SchedulerSettings = DEFAULT_SETTINGS
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.settings = settings
        self.in_progress = PrefixesInProgress()
        self.waiting = WaitingQueue(ORDERS[settings.queue_order], blocks, self.in_progress, settings.queue_patience)
        self.running: dict[SequenceKey, Sequence] = {}
        self.swaps = Swapper(blocks, settings)
        self.beams = BeamGroups(blocks, self.running, limits.eos_token_ids, limits.max_model_len)
        self.gangs = Gangs()
        self.num_preemptions = 0
        self.new_token_ratio = NewTokenRatio(settings.new_token_ratio)
        self.chunks = self.make_chunks()
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._step = 0
        self._uncommitted: list[StepPlan] = []  # in flight, and planned behind it
        self._zombies: set[Sequence] = set()  # ended, while a step may still write into their blocks
        self._admitted_ahead: list[Sequence] = []  # for a plan that came to nothing: the next one reports them
        self.gate: AdmissionGate | None = None
        self.prefill_gate: PrefillGate | None = None
        self._refused: tuple[SequenceKey, int, int] | None = None  # who, with how many blocks available, and headroom

    @classmethod
    def build(cls, limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings) -> Self:
        """The scheduler with the block manager that belongs to it."""
        return cls(limits, cls.block_manager(pool, cache, limits.max_model_len), settings)

    # -- the policy ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_chunks(self) -> Chunks:
        """How prompts are cut."""

    @abstractmethod
    def fill(self, draft: PlanDraft) -> None:
        """Puts into a step what belongs there."""

    def calibrate(self, cost: StepCost) -> None:
        """What steps cost here was measured; for policies that cut prompts by time."""
        self.chunks.calibrate(cost)

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that is known already."""
        self._enter(sequence)
        self.waiting.add(sequence)

    def adopt(self, sequence: Sequence, candidates: Candidates | None = None) -> SequenceOutput | None:
        """Takes over a sequence whose prompt's K/V is computed and whose blocks it holds as `running`.

        A beam search comes with the candidates that follow its prompt; its output is returned if they end it.
        """
        if (sequence.sampling.beams is None) != (candidates is None or not len(candidates.token_ids)):
            raise ValueError(f"sequence {sequence.key}: candidates belong to a beam search, and it to them")
        self._enter(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        if sequence.beams is not None and candidates is not None:
            sequence.beams.offer(sequence, candidates)
            output = self._advance_beams(sequence.beams)
            return output if output is not None and output.finish is not None else None
        self._publish(sequence)
        self.blocks.adopt(sequence)
        return None

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output. One in a step in flight ends when that step is committed. Whether known."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if sequence.num_planned or (sequence.beams is not None and sequence.beams.is_in_flight):
            sequence.abort_requested = True
        else:
            self._leave(sequence)
        return True

    def get(self, key: SequenceKey) -> Sequence | None:
        """A sequence that is waiting or running."""
        return self._sequences.get(key)

    @property
    def num_headroom_blocks(self) -> int:
        """Blocks that the running sequences are expected to take, beyond those they have. O(running) unless off."""
        return self.new_token_ratio.headroom(self.running.values(), self.blocks) + self.beams.num_claimed_blocks

    @property
    def num_slots(self) -> int:
        """Running sequences, and those that beam searches among them will become."""
        return len(self.running) + self.beams.num_claimed_slots

    @property
    def swap_use(self) -> SwapUse:
        """What was copied to the host and back, and what lies there."""
        return self.swaps.use

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs, or holds blocks until a step lands."""
        return bool(self._sequences or self._zombies)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.key} is known already")
        self.beams.enter(sequence)
        self._sequences[sequence.key] = sequence
        if not self.settings.gang_samples:
            sequence.gang = ""
        self.gangs.enter(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING and sequence.beams is not None:
            self._lose_beams(sequence.beams)  # no step behind the one that ended them was planned
        elif sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
            if sequence.num_planned:  # a step writes into its blocks: nobody else may have them before that landed
                self._zombies.add(sequence)
            else:
                self.blocks.free(sequence)
        else:
            self.waiting.remove(sequence)
        self.swaps.drop(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]
        self.gangs.leave(sequence)
        if not self.running:
            self.new_token_ratio.idle()

    def _lose_blocks(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self.blocks.free(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self.waiting.prefixes_changed(self.in_progress.give_up(sequence.key))

    def _row_is_over(self, row: PlannedRow) -> bool:
        """A row's step landed, or will not run. False: its sequence has ended before, the result is nobody's."""
        sequence = row.sequence
        sequence.num_planned -= row.num_tokens
        if row.sample:
            sequence.num_expected -= 1
        if sequence.state is not SequenceState.FINISHED:
            return True
        if not sequence.num_planned:
            self._zombies.remove(sequence)
            self.blocks.free(sequence)
        return False

    def _lose_beams(self, group: BeamGroup) -> None:
        self.beams.leave(group)
        self.waiting.prefixes_changed(self.in_progress.give_up(group.leader.key))

    # -- the decision -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step; a plan with rows is to be committed or failed before the next call."""
        if self._uncommitted:
            raise RuntimeError(f"step {self._uncommitted[0].step} is in flight: only schedule_ahead may plan behind it")
        self.waiting.refresh()
        draft = PlanDraft(self.limits.token_budget)
        self.fill(draft)
        return self._planned(draft)

    def schedule_ahead(self) -> StepPlan | None:
        """Plans the step behind the one in flight; None where that one must be committed first. Preempts nobody."""
        if len(self._uncommitted) != 1:
            raise RuntimeError(f"{len(self._uncommitted)} steps are in flight or planned, 1 can be planned behind")
        if any(row.sequence.needs_commit_first for row in self._uncommitted[0].rows):
            return None
        self.waiting.refresh()
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

    def cancel_plan(self, plan: StepPlan) -> None:
        """A step that was planned ahead does not run: its sequences are where they were. Who was admitted stays."""
        if self._uncommitted[-1] is not plan:
            raise RuntimeError(f"step {plan.step} is not the last one planned")
        self._uncommitted.pop()
        self.blocks.copies.cancelled(plan.copies)
        for row in plan.rows:
            sequence = row.sequence
            if self._row_is_over(row) and sequence.abort_requested and not sequence.num_planned:
                self._leave(sequence)

    def _planned(self, draft: PlanDraft) -> StepPlan:
        self._step += 1
        if self._admitted_ahead:
            still_here = [sequence for sequence in self._admitted_ahead if sequence.state is SequenceState.RUNNING]
            draft.admitted = [*still_here, *draft.admitted]
            self._admitted_ahead = []
        copies = self.blocks.copies.plan(_beam_targets(draft))
        plan = draft.finish(self._step, self.swaps.seal(draft), copies)
        if self.prefill_gate is not None:
            self.prefill_gate.passed(len(self.running), len(plan.admitted) - len(draft.returning))
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_planned += row.num_tokens
            if row.sample:
                sequence.num_expected += 1
        if plan.has_work:
            self._uncommitted.append(plan)
        return plan

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence with a step in flight has one behind it, unless it draws a token that ends it."""
        if sequence.abort_requested:
            return False
        expected = sequence.num_expected
        return not expected or not (
            sequence.prefill_only
            or sequence.num_output + expected >= sequence.sampling.max_tokens
            or sequence.num_tokens + expected >= self.limits.max_model_len
        )

    def plan_decodes(self, draft: PlanDraft) -> None:
        """Every running decode, one token each; those that find no block take it from others, or go themselves."""
        for sequence in [s for s in self.running.values() if s.is_decoding]:
            if sequence.num_planned and not self._goes_on(sequence):
                continue
            position = sequence.num_computed + sequence.num_planned
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, position + 1, draft):
                draft.add_decode(PlannedRow(sequence, position, 1, False, True))

    def plan_prompts(self, draft: PlanDraft) -> None:
        """The next chunks of the prompts that hold blocks, in the order of their admission."""
        for sequence in [s for s in self.running.values() if not s.is_decoding and s.num_remaining]:
            if sequence.num_planned and not self._goes_on(sequence):
                continue
            if sequence.state is SequenceState.RUNNING:
                num_tokens = self.chunks.size(sequence.num_remaining, sequence.next_position, draft)
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

    def _admit_next(self, draft: PlanDraft, beyond_budget: bool) -> str:
        """Admits the sequence whose turn it is, or says why not."""
        if draft.preempted:
            return "decodes were preempted in this step"
        if not self.waiting:
            return "queue empty"
        num_slots = self.num_slots
        if num_slots >= self.limits.max_running:
            return "max_running reached"
        sequence = self.waiting.head()
        if sequence is None:
            return "its prefix is being computed"
        if num_slots + sequence.num_slots > self.limits.max_running:
            return "max_running leaves no room for all its beams"
        if self.gate is not None and (reason := self.gate(sequence)):
            return reason
        is_swapped = sequence.state is SequenceState.SWAPPED
        gate = None if is_swapped else self.prefill_gate
        if gate is not None and (reason := gate.ask(len(self.running), self._kv_usage)):
            draft.delayed = True
            return reason
        if len(gang := self.gangs.preempted_with(sequence)) > 1 and sequence in gang:
            if self._admit_gang(gang, draft):
                return ""
            if self.running:
                return "no room for the whole gang"
            if draft.ahead:
                raise NeedsCommit
        if is_swapped:
            return self._admit_swapped(sequence, draft, beyond_budget)
        position = self.blocks.num_cached_blocks(sequence) * self.blocks.pool.block_size
        num_tokens = self.chunks.size(sequence.num_tokens - position, position, draft)
        if not num_tokens and not beyond_budget:
            return "budget spent"
        if not self._give_blocks(sequence, num_tokens):
            return "no blocks"
        self._admitted(sequence)
        draft.admitted.append(sequence)
        if num_tokens:
            self._plan_chunk(sequence, num_tokens, draft)
        return ""

    def _admit_swapped(self, sequence: Sequence, draft: PlanDraft, beyond_budget: bool) -> str:
        """As above, for one whose K/V comes back from the host: it goes on where it was. Not while a step is in flight:
        what is copied when is for one step at a time to say. Without room nothing is to be said, and steps go on."""
        position = self.swaps.num_tokens(sequence)
        if draft.ahead:
            if self.blocks.num_missing(sequence, position) + self.num_headroom_blocks > self.blocks.pool.num_available:
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

    def _admit_gang(self, gang: Seq[Sequence], draft: PlanDraft) -> bool:
        """All of them, whatever the budget, or nobody. Not while a step is in flight, as one that is swapped."""
        size = self.blocks.pool.block_size
        missing = [blocks_for(each.num_tokens, size) - self.blocks.num_cached_blocks(each) for each in gang]
        if self.num_slots + len(gang) > self.limits.max_running or sum(missing) > self.blocks.pool.num_available:
            return False
        if draft.ahead:
            raise NeedsCommit
        for index, sequence in enumerate(gang):
            if not self._give_all_blocks(sequence, draft):
                for given in reversed(gang[:index]):
                    self.swaps.undo(given, draft)
                    self.blocks.free(given)
                return False
        for sequence in gang:
            self._admitted(sequence)
            draft.admitted.append(sequence)
            if sequence.is_decoding:
                if self.mixes_prompts_and_decodes and draft.budget_left > 0:
                    draft.add_decode(PlannedRow(sequence, sequence.num_computed, 1, False, True))
            elif num_tokens := self.chunks.size(sequence.num_remaining, sequence.num_computed, draft):
                self._plan_chunk(sequence, num_tokens, draft)
        return True

    def _give_all_blocks(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Blocks for all known tokens of a preempted sequence, swapped or not."""
        headroom = self.num_headroom_blocks
        if sequence.state is SequenceState.SWAPPED:
            num_next = sequence.num_tokens - self.swaps.num_tokens(sequence)
            return self.swaps.resume(sequence, num_next, headroom, draft)
        return self.blocks.admit(sequence, Owner.COMPUTING, first_chunk=sequence.num_tokens, headroom=headroom)

    @property
    def _kv_usage(self) -> float:
        """Share of the pool that cannot be had."""
        pool = self.blocks.pool
        return 1 - pool.num_available / pool.num_blocks

    def _give_blocks(self, sequence: Sequence, first_chunk: int) -> bool:
        """Admission as SGLang's paper has it: free and evictable blocks must hold the part that is not cached, and what
        the running sequences are expected to take. A refusal stands until blocks come back.
        """
        available = self.blocks.pool.num_available
        headroom = self.num_headroom_blocks
        if sequence.beams is not None:
            headroom += sequence.beams.num_claimed_blocks()
        if self._refused is not None:
            key, available_then, headroom_then = self._refused
            if key == sequence.key and available <= available_then and headroom >= headroom_then:
                return False
        admitted = self.blocks.admit(sequence, Owner.COMPUTING, first_chunk=first_chunk, headroom=headroom)
        self._refused = None if admitted else (sequence.key, available, headroom)
        return admitted

    def _admitted(self, sequence: Sequence) -> None:
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        self.swaps.resumed(sequence)
        self.waiting.admitted(sequence)
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
        draft.add_chunk(PlannedRow(sequence, sequence.next_position, num_tokens, is_prefill=True, sample=sample))

    # -- room ---------------------------------------------------------------------------------------------------------

    def _room_for_chunk(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> int:
        """The chunk shrinks to the blocks there are; where there are none, others make room for its first token."""
        table, position = sequence.table, sequence.next_position
        available = self.blocks.pool.num_available * table.block_size
        room = table.capacity_tokens + available - position
        num_tokens = min(num_tokens, max(room, 1))
        return num_tokens if self._make_room(sequence, position + num_tokens, draft) else 0

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Blocks for `num_tokens` tokens, at the cost of others; False if the sequence was preempted itself."""
        while not self.blocks.grow(sequence, num_tokens):
            if draft.ahead:
                raise NeedsCommit
            for victim in reversed(self.gangs.running_with(self._victim())):
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
        self.waiting.prefixes_changed(self.in_progress.give_up(leader.key))

    def _requeue_swapped(self, sequence: Sequence) -> None:
        """Its K/V did not come back from the host, and is there still."""
        self._lose_blocks(sequence)
        sequence.state = SequenceState.SWAPPED
        self.waiting.resume(sequence)

    # -- the result ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Books a step's result; returns what is to be told about it. Finished sequences have left."""
        self._landed(plan)
        self.blocks.copies.done(plan.copies)
        self.chunks.measured(plan, result.forward_s)
        self.swaps.landed(plan, result.forward_s, result.copy_s)
        self.new_token_ratio.relax()
        outputs = []
        groups: dict[BeamGroup, None] = {}
        for row, given in zip(plan.rows, result.rows, strict=True):
            if (group := row.sequence.beams) is not None:
                self._commit_beam(row, given)
                groups[group] = None
                continue
            output = self._commit_row(row, given)
            if output is not None:
                outputs.append(output)
        return outputs + [output for group in groups if (output := self._advance_beams(group)) is not None]

    def _commit_beam(self, row: PlannedRow, given: RowResult) -> None:
        sequence = row.sequence
        assert sequence.beams is not None
        self._row_is_over(row)  # they end with a commit only
        sequence.num_computed += row.num_tokens
        if given.candidates is not None:
            sequence.beams.offer(sequence, given.candidates)

    def _advance_beams(self, group: BeamGroup) -> SequenceOutput | None:
        """A step of a beam search, once all that it needs was computed."""
        leader = group.leader
        if leader.abort_requested:
            self._leave(leader)
            return None
        is_trunk = not group.is_forked
        if is_trunk:
            self._publish(leader)  # beams are not: those that nobody follows leave nothing behind
        if not group.is_ready:
            return None
        step = self.beams.advance(group)
        finish = step.results[0].finish if step.results else None
        if finish:
            self._leave(leader)
        if not finish and not (is_trunk and step.first is not None):
            return None
        return SequenceOutput(
            leader,
            0,
            finish=finish,
            prefilled=is_trunk,
            candidates=step.first if is_trunk else None,
            beams=step.results,
        )

    def _landed(self, plan: StepPlan) -> None:
        if plan.has_work:
            if not self._uncommitted or self._uncommitted[0] is not plan:
                raise RuntimeError(f"step {plan.step} is not the one in flight")
            del self._uncommitted[0]

    def _commit_row(self, row: PlannedRow, given: RowResult) -> SequenceOutput | None:
        sequence = row.sequence
        if not self._row_is_over(row):
            return None
        sequence.num_computed += row.num_tokens
        if sequence.abort_requested:
            self._leave(sequence)
            return None
        if sequence.num_computed >= (sequence.num_published + 1) * self.blocks.pool.block_size:
            self._publish(sequence)
        # Not by the row: the last token of a resumed prompt is output, and alone in its step it looks like a decode.
        prefilled = sequence.owner is Owner.COMPUTING and sequence.num_computed == sequence.num_tokens
        index = sequence.num_output
        finish = None
        if given.token_id is not None:
            sequence.tokens.append(given.token_id)
            finish = self._finish(sequence, given.token_id)
        elif prefilled and not sequence.wants_token:
            finish = FinishReason.LENGTH
        if prefilled and not finish and not sequence.prefill_only:
            self.blocks.change_owner(sequence, Owner.RUNNING)
        if finish:
            self._leave(sequence)
        if given.token_id is None and not given.prompt_logprobs and not prefilled:
            return None
        return SequenceOutput(sequence, index, given.token_id, given.logprobs, given.prompt_logprobs, finish, prefilled)

    def fail_step(self, plan: StepPlan, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step could not be computed: the sequences with these keys leave (None: all of them). Returns them.

        The others are where they were before the step; its copies to and from the host were made if keys are given.
        """
        self._landed(plan)
        if self._uncommitted:
            raise RuntimeError(f"step {self._uncommitted[0].step} is planned upon the one that failed")
        self.blocks.copies.done(plan.copies)
        failed = []
        landed = [row for row in plan.rows if self._row_is_over(row)]
        for sequence in dict.fromkeys(_accountable(row) for row in landed):
            if keys is None or sequence.key in keys or sequence.abort_requested:
                self._leave(sequence)
                failed.append(sequence)
        if keys is not None:
            self.swaps.landed(plan, 0.0, 0.0)
        else:
            for sequence in self.swaps.failed(plan):
                self._requeue_swapped(sequence)
        return failed

    def _publish(self, sequence: Sequence) -> None:
        published = self.blocks.publish(sequence)
        self.in_progress.kept(sequence.key, len(published))
        self.waiting.prefixes_changed(published)

    def _finish(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if not sampling.ignore_eos and token_id in self.limits.eos_token_ids:
            return FinishReason.STOP_TOKEN
        num_tokens = sequence.tokens.num_tokens
        if num_tokens - sequence.num_prompt >= sampling.max_tokens or num_tokens >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None


def _accountable(row: PlannedRow) -> Sequence:
    """The sequence, or the leader of the beams that it is one of."""
    return row.sequence if row.sequence.beams is None else row.sequence.beams.leader


def _beam_targets(draft: PlanDraft) -> Iterator[int]:
    """The blocks that the beams of a step write into first; what they write behind those is their own anyway."""
    for row in draft.rows:
        if row.sequence.beams is not None:
            table = row.sequence.table
            yield int(table.ids[row.position // table.block_size])
