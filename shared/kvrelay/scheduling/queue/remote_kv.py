"""Handoffs in the scheduler: sequences whose prompt's KV is computed and sent by another worker.

1. WAITING                in the waiting queue, among local prompts and in the same order. Holds nothing.
2. WAITING_FOR_REMOTE_KV  admitted: all its blocks are reserved, the transfer may begin. Counts towards `max_running`.
3. RUNNING                adopted: all blocks and the first token are here. From now on a sequence like any other: if it
                          is preempted, it waits and is computed here.
   DROPPED                dropped while its sender may still write: holds its blocks, and counts towards nothing else.
4. FINISHED               released or ended. Holds nothing.

Samples of one request arrive as handoffs of their own, one after the other; each says how many are still to come. When
the first is admitted, capacity for the others is reserved: places among the running sequences, and the blocks that they
do not share with the first. So a group is admitted as a whole or not at all, as a group of local samples is. Those with
reserved capacity are admitted before all others. The reservation ends when the last of them has been admitted or has
left, and at the latest when no sample of the group is received or runs here: samples that ended with their first token,
or went to another worker, never arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.waiting_queue import WaitingQueue
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence, SequenceState


@dataclass(slots=True)
class _Expected:
    """Samples of a group that capacity is reserved for, arrived or not, and the blocks for each."""

    num_samples: int
    num_blocks_each: int


class RemoteSequences:
    """The handoffs of one scheduler, and the capacity that is reserved for them."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        in_progress: PrefixesInProgress,
    ) -> None:
        self._blocks = blocks
        self._limits = limits
        self._waiting = waiting
        self._in_progress = in_progress
        self._capacity = blocks.capacity
        self.receiving: dict[SequenceKey, Sequence] = {}
        self._expected: dict[str, _Expected] = {}
        self._pending: dict[str, dict[SequenceKey, Sequence]] = {}  # handoffs in the queue, by sample group
        self._num_to_arrive: dict[str, int] = {}  # samples behind the last one that arrived, by sample group
        self._reserved: set[SequenceKey] = set()  # pending handoffs that capacity is reserved for
        self._announced: list[Sequence] = []  # reserved since `take_reservations`

    # -- the queue ----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        if sequence.origin.sample_group:
            self._pending.setdefault(sequence.origin.sample_group, {})[sequence.key] = sequence
            self._num_to_arrive[sequence.origin.sample_group] = sequence.remote.num_to_come if sequence.remote else 0
            self._reserve_for_pending(sequence.origin.sample_group)

    def remove(self, sequence: Sequence) -> None:
        """Takes a handoff out of the queue that was not admitted."""
        self._waiting.remove(sequence)
        self._no_longer_pending(sequence)

    def refresh(self, running: Iterable[Sequence]) -> None:
        """Drops the capacity of groups that are gone. O(sequences here) if any capacity is reserved."""
        if not self._expected:
            return
        present = {sequence.origin.sample_group for sequence in running} | {
            each.origin.sample_group for each in self.receiving.values()
        }
        for group in self._expected.keys() - present:
            self._expect(group, 0)
            for sequence in self._pending.get(group, {}).values():
                if sequence.key in self._reserved:
                    self._reserved.remove(sequence.key)
                    self._waiting.withdraw_reservation(sequence)

    def _expect(self, group: str, num_samples: int) -> None:
        """Capacity is reserved for so many samples of this group from now on."""
        expected = self._expected[group]
        expected.num_samples = num_samples
        if num_samples:
            self._capacity.reserve(group, num_samples, num_samples * expected.num_blocks_each)
        else:
            self._capacity.end(group)
            del self._expected[group]

    def _reserve_for_pending(self, group: str) -> None:
        expected, pending = self._expected.get(group), self._pending.get(group, {})
        if expected is None:
            return
        num_reserved = sum(key in self._reserved for key in pending)
        for key, sequence in pending.items():
            if num_reserved == expected.num_samples:
                break
            if key not in self._reserved:
                num_reserved += 1
                self._reserved.add(key)
                self._waiting.reserve(sequence)

    def _no_longer_pending(self, sequence: Sequence) -> None:
        """It was admitted or has left: its reserved capacity ends."""
        pending = self._pending.get(sequence.origin.sample_group)
        if pending is None:
            return
        del pending[sequence.key]
        if not pending:
            del self._pending[sequence.origin.sample_group], self._num_to_arrive[sequence.origin.sample_group]
        if sequence.key in self._reserved:
            self._reserved.remove(sequence.key)
            self._expect(sequence.origin.sample_group, self._expected[sequence.origin.sample_group].num_samples - 1)

    # -- admission ----------------------------------------------------------------------------------------------------

    def has_capacity(self, sequence: Sequence) -> bool:
        """Whether a sample of its group was admitted before and has reserved capacity for this handoff."""
        return sequence.key in self._reserved

    def num_to_come(self, sequence: Sequence) -> int:
        """Samples that capacity is to be reserved for when this handoff is admitted.

        These are the other samples of its group in the queue, and those that are to arrive. 0 for groups that could
        never be here as a whole: their samples are admitted one by one.
        """
        remote = sequence.remote
        if remote is None or not sequence.origin.sample_group or sequence.origin.sample_group in self._expected:
            return 0
        # Not `remote.num_to_come`: under an order other than arrival, samples behind it may be here or gone already.
        group = sequence.origin.sample_group
        num_samples = len(self._pending[group]) - 1 + self._num_to_arrive[group]
        num_blocks = self._blocks.num_at_admission(sequence) + num_samples * self._blocks.num_own(sequence, sequence)
        fits = 1 + num_samples <= self._limits.max_running and num_blocks <= self._blocks.num_usable
        return num_samples if fits else 0

    def reserve(self, sequence: Sequence, headroom: int) -> bool:
        """Gives a handoff blocks for its whole prompt, and reserves capacity for the samples to come.

        `headroom`: blocks that must stay available besides. False if there are not enough.
        """
        remote, num_to_come = sequence.remote, self.num_to_come(sequence)
        assert remote is not None
        num_blocks_each = self._blocks.num_own(sequence, sequence) if num_to_come else 0
        headroom += num_to_come * num_blocks_each
        if not self._blocks.admit(sequence, BlockState.RESERVED, headroom=headroom):
            return False
        self._waiting.admitted(sequence)
        self._no_longer_pending(sequence)
        sequence.state = SequenceState.WAITING_FOR_REMOTE_KV
        self.receiving[sequence.key] = sequence
        self._capacity.reserve(sequence.key, sequence.num_slots, sequence.num_fork_blocks)
        self._announced.append(sequence)
        if self._blocks.shares_prefixes:
            hashes = sequence.block_hashes(sequence.num_full_blocks)
            self._in_progress.promise(sequence.key, hashes[sequence.num_published :])
        if num_to_come:
            self._expected[sequence.origin.sample_group] = _Expected(num_to_come, num_blocks_each)
            self._expect(sequence.origin.sample_group, num_to_come)
            self._reserve_for_pending(sequence.origin.sample_group)
        return True

    def take_reservations(self) -> list[Sequence]:
        """Handoffs that were admitted since the last call and are still being received."""
        if not self._announced:
            return []
        announced, self._announced = self._announced, []
        return [each for each in announced if each.state is SequenceState.WAITING_FOR_REMOTE_KV]

    # -- the end of a transfer ----------------------------------------------------------------------------------------

    def drop(self, sequence: Sequence) -> None:
        """Given up while its sender may still write into its blocks."""
        self.end_transfer(sequence)
        self._blocks.change_block_state(sequence, BlockState.QUARANTINED)
        sequence.state = SequenceState.DROPPED

    def leave(self, sequence: Sequence) -> None:
        """Ends a handoff that was not adopted. Its sender writes nothing any more; blocks are published or lost."""
        if sequence.state is SequenceState.WAITING:
            self.remove(sequence)
            return
        if sequence.state is SequenceState.WAITING_FOR_REMOTE_KV:
            self.end_transfer(sequence)
        self._blocks.free(sequence)

    def end_transfer(self, sequence: Sequence) -> None:
        """All KV is here, or the handoff was dropped: it is not received any more."""
        del self.receiving[sequence.key]
        self._capacity.end(sequence.key)
        self._waiting.prefixes_changed(self._in_progress.withdraw(sequence.key))
