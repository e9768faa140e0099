"""The life of sequences in a scheduler: how they join, run, lose their blocks and leave.

- A fork is one beam of a search: a sequence that shares another one's blocks down to where they part.
- A sample is one of the `n` answers to a prompt; room for those that wait is reserved.
- A tail is the part of a prompt behind its last full block, of which others may get a copy.
- A prefix is promised while the sequence that computes it runs; others wait for it.
"""

from __future__ import annotations

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_groups import BeamGroups
from kvrelay.scheduling.fair_shares import FairShares
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.new_token_ratio import NewTokenRatio
from kvrelay.scheduling.memory.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.memory.swapping import Swapper
from kvrelay.scheduling.plan import NeedsCommit, PlanBuilder, PlannedRow
from kvrelay.scheduling.queue.queue_orders import ORDERS
from kvrelay.scheduling.queue.remote_kv import RemoteSequences
from kvrelay.scheduling.queue.sample_groups import SampleGroups
from kvrelay.scheduling.queue.waiting_queue import WaitingQueue
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.speculation.forced_tokens import ForcedTokens
from kvrelay.scheduling.speculation.speculator import Speculator


class SequenceLifecycle:
    """The sequences of one scheduler and their transitions (states: `sequence.py`).

    Planning, admission and commit read its collaborators, and change sequences only by its methods.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, settings: SchedulerSettings) -> None:
        self.limits = limits
        self.blocks = blocks
        self.running: dict[SequenceKey, Sequence] = {}
        self.in_progress = PrefixesInProgress()
        self.shares = FairShares(self.running, limits.max_running)
        order, starvation_bound = ORDERS[settings.queue_order], settings.queue_starvation_bound
        self.waiting = WaitingQueue(order, blocks, self.in_progress, starvation_bound, self.shares)
        self.remote = RemoteSequences(blocks, limits, self.waiting, self.in_progress)  # handed over by prefill
        self.offload = Swapper(blocks, settings)  # of preempted sequences, to the host
        self.forks = BeamGroups(blocks, self.running)
        self.sample_groups = SampleGroups(blocks, limits)
        self.new_token_ratio = NewTokenRatio(settings.new_token_ratio)
        self.speculator = Speculator(settings.speculation)
        self.forced = ForcedTokens(settings)
        self._takes_least_progress = settings.retraction == "least_progress"
        self.num_preemptions = 0
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._ended_in_flight: set[Sequence] = set()  # a step may still write into their blocks

    # -- join ---------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for a known one."""
        if sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.key} is known already")
        sampling = sequence.sampling
        stop_tokens = frozenset() if sampling.ignore_eos else self.limits.eos_token_ids
        sequence.stop_tokens = stop_tokens.union(sampling.stop_token_ids)
        sequence.max_length = min(sequence.num_prompt + sampling.max_tokens, self.limits.max_model_len)
        self.forks.enter(sequence)
        self.speculator.begin(sequence)
        self.forced.begin(sequence)
        self.blocks.tails.enter(sequence)
        self._sequences[sequence.key] = sequence
        self.shares.enter(sequence)
        if sequence.remote is None:
            self.sample_groups.enter(sequence)
            self.waiting.add(sequence)
        else:
            self.remote.add(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """A waiting sequence got its blocks: it runs."""
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        self.offload.resumed(sequence)
        self.waiting.admitted(sequence)
        self.sample_groups.settle(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        if sequence.forks is not None:
            self.forks.admitted(sequence)
        if self.blocks.shares_prefixes:
            hashes = sequence.block_hashes(sequence.num_full_blocks)
            self.in_progress.promise(sequence.key, hashes[sequence.num_published :])
            tail = self.blocks.tails.begin(sequence)
            if tail is not None:
                self.in_progress.promise_tail(sequence.key, tail)

    def received(self, sequence: Sequence) -> None:
        """A handoff is complete: the sequence runs."""
        self.remote.end_transfer(sequence)
        sequence.remote = None
        self.sample_groups.enter(sequence)
        self.blocks.change_block_state(sequence, BlockState.RUNNING)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence

    # -- run ----------------------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Offers its computed blocks to the prefix cache. Sequences that wait for these blocks are listed again."""
        published = self.blocks.publish(sequence)
        self.in_progress.kept(sequence.key, len(published))
        self.waiting.prefixes_changed(published)
        if self.blocks.tails.computing.get(sequence) == sequence.num_computed:
            self._publish_tail(sequence)

    def _publish_tail(self, sequence: Sequence) -> None:
        """Offers the sequence's tail, at whose end a chunk has ended. If no block is left for a copy, one of the
        sequences that wait for the tail computes it."""
        self.blocks.tails.stopped(sequence)
        if self.blocks.num_available > self.num_reserved_blocks:
            self.blocks.tails.publish(sequence)
        self.waiting.prefixes_changed(self.in_progress.tail_ended(sequence.key))

    def row_ended(self, row: PlannedRow) -> bool:
        """The row's step has ended or will not run. Returns False if its sequence had ended before.

        The result of such a row is dropped. Its blocks are freed here, when no step writes into them any more.
        """
        sequence = row.sequence
        sequence.num_planned -= row.num_tokens
        sequence.num_expected -= row.sample
        if sequence in self.forced.unsettled:
            self.forced.row_ended(row)
        if sequence.state is not SequenceState.FINISHED:
            return True
        self.free_ended(sequence)
        return False

    def free_ended(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that ended while it was in a step, unless another step is still planned."""
        if not sequence.num_planned:
            self._ended_in_flight.remove(sequence)
            self.blocks.free(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self.waiting.prefixes_changed(self.in_progress.withdraw(sequence.key))

    # -- lose blocks --------------------------------------------------------------------------------------------------

    def make_room(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Gives a running sequence blocks for `num_tokens` tokens, by preemption if none are left. Returns False if it
        was preempted itself.

        Raises NeedsCommit instead of preempting if the builder is for a step behind the one in flight.
        """
        while not self.blocks.grow(sequence, num_tokens):
            if builder.ahead:
                raise NeedsCommit
            builder.is_short_of_blocks = True
            self._preempt_group(self._victim(), builder)
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def _victim(self) -> Sequence:
        """Returns the latest admitted sequence, or the one with the least output; if several owners are here, of the
        one that was served most."""
        latest_first = reversed(self.running.values())
        if self.shares.is_contested or self._takes_least_progress:
            return max(latest_first, key=self._preemption_rank)
        return next(latest_first)

    def _preemption_rank(self, sequence: Sequence) -> tuple[float, int]:
        served = self.shares.counter(sequence) if self.shares.is_contested else 0.0
        return served, -sequence.num_output if self._takes_least_progress else 0

    def _preempt_group(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Preempts a sequence together with the samples of its group."""
        for reserved in reversed(self.sample_groups.lose_reserved(sequence)):
            self.waiting.remove(reserved)
            self.waiting.resume(reserved)
        for victim in reversed(self.sample_groups.running_with(sequence)):
            self.preempt(victim, builder)

    def preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Takes a sequence's blocks and queues it again. Its KV is copied to the host or recomputed later.

        A recomputed sequence computes its output along with its prompt; blocks that it published may still be cached.
        Forks are preempted together, and their common prefix is recomputed.
        """
        sequence = sequence.fork_of or sequence
        if self.offload.undo(sequence, builder):
            builder.preempt(sequence)
            self.requeue_on_host(sequence)
            return
        is_on_host = self.offload.preempt(sequence, builder)
        for each in self.forks_of(sequence):
            builder.drop_row(each)
        self._lose_blocks(sequence)
        builder.preempted.append(sequence)
        sequence.state = SequenceState.ON_HOST if is_on_host else SequenceState.WAITING
        if not is_on_host:
            builder.recomputed.append(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.resume(sequence)
        if builder.is_short_of_blocks:
            self.new_token_ratio.retracted(self.running.values())

    def _lose_blocks(self, sequence: Sequence) -> None:
        """A running sequence stops, with its forks, and its blocks are released. The caller queues it again."""
        for each in self.forks_of(sequence):
            self._stop_running(each)
            self.blocks.free(each)
            each.state = SequenceState.FINISHED  # the caller queues the leader, and only that, again
        if sequence.forks is not None:
            self.forks.collapse(sequence)

    def requeue_on_host(self, sequence: Sequence) -> None:
        """A sequence was to be copied back from the host, and was not: it waits again, its KV still on the host."""
        self._lose_blocks(sequence)
        sequence.state = SequenceState.ON_HOST
        self.waiting.resume(sequence)

    # -- leave --------------------------------------------------------------------------------------------------------

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output, after the commit of its step if it is in one. Returns whether it is known."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if any(each.num_planned for each in self.forks_of(sequence)):
            sequence.abort_requested = True
        else:
            self.leave(sequence)
        return True

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends, in whatever state it is, and is forgotten."""
        if sequence.state is SequenceState.RUNNING:
            for each in self.forks_of(sequence):
                self._stop_running(each)
                each.state = SequenceState.FINISHED
                # A planned step still writes into its blocks: they must not be allocated to others before it has ended.
                if each.num_planned:
                    self._ended_in_flight.add(each)
                else:
                    self.blocks.free(each)
        elif sequence.remote is not None:
            self.remote.leave(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.forks is not None:
            self.forks.left(sequence)
        self.offload.drop(sequence)
        self.speculator.ended(sequence)
        self.forced.ended(sequence)
        self.blocks.tails.ended(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]
        self.shares.leave(sequence)
        self.sample_groups.leave(sequence)
        if not self.running:
            self.new_token_ratio.idle()

    # -- numbers ------------------------------------------------------------------------------------------------------

    def get(self, key: SequenceKey) -> Sequence | None:
        """Returns the sequence if it waits, is being received, or runs."""
        return self._sequences.get(key)

    def forks_of(self, sequence: Sequence) -> list[Sequence]:
        """Returns all sequences of the group that this one leads, itself included."""
        return [sequence] if sequence.forks is None else self.forks.forks_of(sequence)

    @property
    def has_work(self) -> bool:
        """Returns whether a sequence is known, or one that was ended is still in a step in flight."""
        return bool(self._sequences or self._ended_in_flight)

    @property
    def num_slots(self) -> int:
        """Number of running sequences, with those that capacity is reserved for: forks, samples and handoffs."""
        return len(self.running) + self.blocks.capacity.num_slots

    @property
    def num_reserved_blocks(self) -> int:
        """Number of blocks that are reserved for samples, forks and handoffs."""
        return self.blocks.capacity.num_blocks

    @property
    def num_headroom_blocks(self) -> int:
        """Number of blocks that admission leaves free: reserved ones, and those that running sequences will need.

        O(running), unless the new-token ratio is off.
        """
        return self.new_token_ratio.headroom(self.running.values(), self.blocks) + self.num_reserved_blocks
