"""Frees blocks for a running sequence by preempting others."""

from __future__ import annotations

from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import NeedsCommit, PlanBuilder
from kvrelay.scheduling.scheduler_settings import Retraction
from kvrelay.scheduling.sequence import Sequence, SequenceState


class Preemptor:
    """Preempts sequences of one scheduler. `retraction` selects the victim."""

    def __init__(self, lifecycle: SequenceLifecycle, retraction: Retraction) -> None:
        self._lifecycle = lifecycle
        self._retraction = retraction
        self.num_preemptions = 0

    def make_room(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Gives a sequence blocks for `num_tokens` tokens. Returns False if it was preempted itself.

        Raises NeedsCommit instead of preempting if the builder is for a step behind the one in flight.
        """
        lifecycle = self._lifecycle
        while not lifecycle.blocks.grow(sequence, num_tokens):
            if builder.ahead:
                raise NeedsCommit
            builder.is_short_of_blocks = True
            self.preempt_group(self._victim(), builder)
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def _victim(self) -> Sequence:
        """Returns the latest admitted sequence, or with `least_progress` the one with the least output. If several
        tenants are here, it is one of the running tenant that was served most."""
        latest_first = list(reversed(self._lifecycle.running.values()))
        shares = self._lifecycle.shares
        if shares.is_contested:
            most = max(map(shares.counter, latest_first))
            latest_first = [sequence for sequence in latest_first if shares.counter(sequence) == most]
        if self._retraction == "latest":
            return latest_first[0]
        return min(latest_first, key=lambda sequence: sequence.num_output)

    def preempt_group(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Preempts a sequence together with the samples of its group."""
        lifecycle = self._lifecycle
        for reserved in reversed(lifecycle.sample_groups.lose_reserved(sequence)):
            lifecycle.waiting.remove(reserved)
            lifecycle.waiting.resume(reserved)
        for victim in reversed(lifecycle.sample_groups.running_with(sequence)):
            self.preempt(victim, builder)

    def preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Takes a sequence's blocks and queues it again. Its KV is swapped to the host or recomputed later.

        A recomputed sequence computes its output along with its prompt; blocks that it published may still be cached.
        Forks are preempted together, and their common prefix is recomputed.
        """
        lifecycle, sequence = self._lifecycle, sequence.fork_of or sequence
        if lifecycle.swaps.undo(sequence, builder):
            builder.preempt(sequence)
            lifecycle.requeue_swapped(sequence)
            return
        is_swapped = lifecycle.swaps.preempt(sequence, builder)
        for each in lifecycle.forks_of(sequence):
            builder.drop_row(each)
        lifecycle.lose_blocks(sequence)
        builder.preempted.append(sequence)
        sequence.state = SequenceState.SWAPPED if is_swapped else SequenceState.WAITING
        if not is_swapped:
            builder.recomputed.append(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        lifecycle.waiting.resume(sequence)
        if builder.is_short_of_blocks:
            lifecycle.new_token_ratio.retracted(lifecycle.running.values())
