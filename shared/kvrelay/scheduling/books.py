"""Who is here, who holds blocks, and what a step's result means: what schedulers keep besides planning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from collections.abc import Sequence as Seq

from kvrelay.engine.batch import BeamCandidates, RowResult, StepResult
from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_groups import BeamGroup, BeamGroups
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.new_token_ratio import NewTokenRatio
from kvrelay.scheduling.memory.swapping import Swapper, SwapUse
from kvrelay.scheduling.plan import PlannedRow, SequenceOutput, StepPlan
from kvrelay.scheduling.policies.chunk_sizes import Chunks
from kvrelay.scheduling.queue.group_capacity import GroupCapacity
from kvrelay.scheduling.queue.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.queue_orders import ORDERS
from kvrelay.scheduling.queue.remote_kv import RemoteSequences
from kvrelay.scheduling.queue.sample_groups import SampleGroups
from kvrelay.scheduling.queue.sender_limits import SenderLimits
from kvrelay.scheduling.queue.waiting_queue import WaitingQueue
from kvrelay.scheduling.scheduler_protocol import PrefillGate
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_cost import StepCost

DEFAULT_SETTINGS = SchedulerSettings()


class SchedulerBooks(ABC):
    """See the module's text. `BatchScheduler` makes the plans that are booked here."""

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, settings: SchedulerSettings = DEFAULT_SETTINGS
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.settings = settings
        self.in_progress = PrefixesInProgress()
        senders = SenderLimits(blocks.pool.num_blocks)
        self.waiting = WaitingQueue(
            ORDERS[settings.queue_order], blocks, self.in_progress, settings.queue_starvation_bound, senders
        )
        self.remote = RemoteSequences(blocks, limits, self.waiting, self.in_progress, senders)
        self.running: dict[SequenceKey, Sequence] = {}
        self.swaps = Swapper(blocks, settings)
        self.beams = BeamGroups(blocks, self.running)
        self.sample_groups = SampleGroups()
        self.group_capacity = GroupCapacity(self.sample_groups, blocks, limits)
        self.num_preemptions = 0
        self._block_size = blocks.pool.block_size
        self.new_token_ratio = NewTokenRatio(settings.new_token_ratio)
        self.chunks = self.make_chunks()
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._step = 0
        self._uncommitted: list[StepPlan] = []  # in flight, and planned behind it
        self._zombies: set[Sequence] = set()  # ended, while a step may still write into their blocks
        self._admitted_ahead: list[Sequence] = []  # for a plan that came to nothing: the next one reports them
        self.prefill_gate: PrefillGate | None = None
        self._refused: tuple[SequenceKey, int, int] | None = None  # who, with how many blocks available, and headroom

    @abstractmethod
    def make_chunks(self) -> Chunks:
        """How prompts are cut."""

    def calibrate(self, cost: StepCost) -> None:
        """What steps cost here was measured; for policies that cut prompts by time."""
        self.chunks.calibrate(cost)

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that is known already."""
        self._enter(sequence)
        if sequence.remote is None:
            self.sample_groups.enter(sequence)
            self.waiting.add(sequence)
        else:
            self.remote.add(sequence)

    def adopt(self, sequence: Sequence, candidates: BeamCandidates | None = None) -> SequenceOutput | None:
        """A handoff is complete: its prompt's KV is in its blocks, and its tokens end with the first new one. It runs.

        A beam search comes with the candidates that follow its prompt; its output is returned if they end it.
        """
        if (sequence.sampling.beams is None) != (candidates is None or not len(candidates.token_ids)):
            raise ValueError(f"sequence {sequence.key}: candidates belong to a beam search, and it to them")
        if sequence.state is not SequenceState.WAITING_FOR_REMOTE_KV:
            raise ValueError(f"sequence {sequence.key} is {sequence.state}: no KV of it is being received")
        self.remote.arrived(sequence)
        sequence.remote = None
        self.sample_groups.enter(sequence)
        self.blocks.change_block_state(sequence, BlockState.RUNNING)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        if sequence.beams is not None and candidates is not None:
            sequence.beams.offer(sequence, candidates)
            output = self._advance_beams(sequence.beams)
            return output if output is not None and output.finish is not None else None
        self._publish(sequence)
        self.blocks.adopt(sequence)
        return None

    def quarantine(self, sequence: Sequence) -> None:
        """A handoff was given up while its sender may still write: it keeps its blocks until `release`."""
        self.remote.quarantine(sequence)

    def release(self, sequence: Sequence, num_computed: int) -> None:
        """A handoff ends and its sender writes nothing any more. The KV of its first `num_computed` tokens is true."""
        sequence.num_computed = num_computed
        self._publish(sequence)
        self._leave(sequence)

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
    def num_pending_handoffs(self) -> int:
        """Sequences among `waiting` whose KV comes from another worker."""
        return self.waiting.num_remote

    @property
    def num_headroom_blocks(self) -> int:
        """Blocks that the running sequences are expected to take, beyond those they have, and those that are set aside.
        O(running) unless off."""
        return self.new_token_ratio.headroom(self.running.values(), self.blocks) + self.num_reserved_blocks

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are set aside for samples, beams and handoffs."""
        return self.beams.num_reserved_blocks + self.sample_groups.num_reserved_blocks + self.remote.num_reserved_blocks

    @property
    def num_slots(self) -> int:
        """Running sequences, those that beam searches among them will become, and the rest of their groups."""
        reserved = self.beams.num_reserved_slots + self.sample_groups.num_reserved_slots
        return len(self.running) + reserved + self.remote.num_slots

    @property
    def group_samples(self) -> bool:
        """Whether the samples of a request run at once."""
        return self.settings.group_samples

    @property
    def num_reserved_samples(self) -> int:
        """Waiting sequences for which room is set aside: the rest of groups that were admitted."""
        return self.sample_groups.num_reserved_slots

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
        sampling = sequence.sampling
        stop_tokens = frozenset() if sampling.ignore_eos else self.limits.eos_token_ids
        sequence.stop_tokens = stop_tokens.union(sampling.stop_token_ids)
        sequence.max_length = min(sequence.num_prompt + sampling.max_tokens, self.limits.max_model_len)
        self.beams.enter(sequence)
        self._sequences[sequence.key] = sequence
        if not self.settings.group_samples:
            sequence.sample_group = ""

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING and sequence.beams is not None:
            self._lose_beams(sequence.beams)  # no step behind the one that ended them was planned
        elif sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
            if sequence.num_planned:  # a step writes into its blocks: nobody else may have them before that landed
                self._zombies.add(sequence)
            else:
                self.blocks.free(sequence)
        elif sequence.remote is not None:
            self.remote.leave(sequence)
        else:
            self.waiting.remove(sequence)
        self.swaps.drop(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]
        self.sample_groups.leave(sequence)
        if not self.running:
            self.new_token_ratio.idle()

    def _lose_blocks(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self.blocks.free(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self.waiting.prefixes_changed(self.in_progress.withdraw(sequence.key))

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
        self.waiting.prefixes_changed(self.in_progress.withdraw(group.leader.key))

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
        return self._commit_rows(plan.rows, result.rows)

    def _commit_rows(self, rows: Seq[PlannedRow], results: Seq[RowResult]) -> list[SequenceOutput]:
        """Appends each row's new tokens, up to the first one that ends its sequence. K/V of all of them but the last is
        computed, see `RowResult`."""
        outputs: list[SequenceOutput] = []
        groups: dict[BeamGroup, None] = {}
        computing, block_size = BlockState.COMPUTING, self._block_size
        for row, given in zip(rows, results, strict=True):
            sequence = row.sequence
            if sequence.beams is not None:
                self._commit_beam(row, given)
                groups[sequence.beams] = None
                continue
            if not self._row_is_over(row):
                continue
            num_computed = sequence.num_computed = sequence.num_computed + row.num_tokens
            if sequence.abort_requested:
                self._leave(sequence)
                continue
            # Not `row.is_prefill`: the last token of a resumed prompt, alone in its step, looks like a decode.
            prefilled = sequence.block_state is computing and num_computed == sequence.tokens.num_tokens
            token_ids, logprobs, finish = given.token_ids, given.logprobs, None
            start = end = sequence.tokens.num_tokens
            for token_id in token_ids:
                end = sequence.tokens.append(token_id)
                if token_id in sequence.stop_tokens or end >= sequence.max_length:
                    finish = FinishReason.STOP_TOKEN if token_id in sequence.stop_tokens else FinishReason.LENGTH
                    token_ids, logprobs = token_ids[: end - start], logprobs[: end - start]
                    break
            if (num_new := end - start) > 1:
                num_computed = sequence.num_computed = num_computed + num_new - 1
            if num_computed - sequence.num_published * block_size >= block_size:
                self._publish(sequence)
            if prefilled:
                finish = self._prefilled(sequence, finish)
            if finish:
                self._leave(sequence)
            scores = given.prompt_logprobs
            if token_ids or scores or prefilled:
                index = start - sequence.num_prompt
                outputs.append(SequenceOutput(sequence, index, token_ids, logprobs, scores, finish, prefilled))
        return outputs + [output for group in groups if (output := self._advance_beams(group)) is not None]

    def _prefilled(self, sequence: Sequence, finish: FinishReason | None) -> FinishReason | None:
        """Called when K/V of the whole prompt is computed. Returns why the sequence ends, or None."""
        if finish is None and not sequence.wants_token:
            return FinishReason.LENGTH
        if finish is None and not sequence.prefill_only:
            self.blocks.change_block_state(sequence, BlockState.RUNNING)
        return finish

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
        is_prefix = not group.has_beams
        if is_prefix:
            self._publish(leader)  # beams are not: those that nobody follows leave nothing behind
        if not group.is_ready:
            return None
        step = self.beams.advance(group)
        finish = step.results[0].finish if step.results else None
        if finish:
            self._leave(leader)
        if not finish and not (is_prefix and step.first is not None):
            return None
        return SequenceOutput(
            leader,
            0,
            finish=finish,
            prefilled=is_prefix,
            candidates=step.first if is_prefix else None,
            beams=step.results,
        )

    def _landed(self, plan: StepPlan) -> None:
        if plan.has_work:
            if not self._uncommitted or self._uncommitted[0] is not plan:
                raise RuntimeError(f"step {plan.step} is not the one in flight")
            del self._uncommitted[0]
            self.blocks.step_landed()

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
        for sequence in dict.fromkeys(accountable(row) for row in landed):
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


def accountable(row: PlannedRow) -> Sequence:
    """The sequence, or the leader of the beams that it is one of."""
    return row.sequence if row.sequence.beams is None else row.sequence.beams.leader
