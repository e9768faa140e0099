"""Sample groups: the samples of one request are admitted, preempted and resumed together (Kwon et al., PagedAttention,
SOSP 2023, section 4.5). Otherwise the blocks that they share would stay for the sake of a few of them.

A group has the samples of a request that this scheduler knows. A sample that does not run is:

1. FRESH     it waits in the queue's order. The first sample of a group is admitted only if all its fresh samples fit.
2. RESERVED  the first sample was admitted and computes the prompt. Capacity is reserved for this one: a place among the
             running sequences, and the blocks that it does not share with the first. It is admitted before others, once
             the blocks of the prompt are computed.
3. LOST      it was preempted, or reserved when the others were preempted. It resumes when all lost samples fit.

No sample waits forever: a reserved sample is next and needs only its own blocks, and a running one ends. A group that
can never fit at once is admitted in parts (the router rejects such requests). A sample that arrives after its group was
admitted forms a group of its own. A sequence that was handed over was admitted by the receiver, by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class GroupReturn:
    """How a preempted group resumes. `given`: samples that get all their blocks at once. `reserved`: samples that wait
    for blocks which the first one recomputes, and the number of blocks reserved for each. `num_blocks`: blocks that
    must be available, not counting cached ones."""

    given: list[Sequence]
    reserved: dict[Sequence, int]
    num_blocks: int


class SampleGroups:
    """The groups of one scheduler's sequences. A sequence without a group forms one of its own. A sequence that only
    computes its prompt for a handoff leaves with its first token, so it is in no group."""

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._capacity = blocks.capacity
        self._members: dict[str, dict[SequenceKey, Sequence]] = {}
        self._lost: set[SequenceKey] = set()  # samples that were RESERVED before

    def enter(self, sequence: Sequence) -> None:
        """A sequence joined the scheduler."""
        if sequence.origin.sample_group and not sequence.prefill_only:
            self._members.setdefault(sequence.origin.sample_group, {})[sequence.key] = sequence

    def leave(self, sequence: Sequence) -> None:
        """A sequence left the scheduler."""
        self.settle(sequence)
        members = self._members.get(sequence.origin.sample_group)
        if members is not None:
            members.pop(sequence.key, None)
            if not members:
                del self._members[sequence.origin.sample_group]

    def has_reserved_capacity(self, sequence: Sequence) -> bool:
        return sequence in self._capacity

    def _fresh_with(self, sequence: Sequence) -> list[Sequence]:
        """Returns the other fresh samples of a fresh sequence's group."""
        members = self._members.get(sequence.origin.sample_group)
        if members is None or not self._is_fresh(sequence):
            return []
        return [each for each in members.values() if each is not sequence and self._is_fresh(each)]

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Reserves capacity for a fresh sample, until `settle`."""
        self._capacity.reserve(sequence, 1, num_blocks)

    def settle(self, sequence: Sequence) -> None:
        """The sequence has its blocks, or leaves: its reserved capacity ends."""
        self._capacity.end(sequence)
        self._lost.discard(sequence.key)

    def running_with(self, sequence: Sequence) -> list[Sequence]:
        """Returns the running sequences that are preempted with this one, and itself."""
        members = self._members.get(sequence.origin.sample_group)
        if members is None:
            return [sequence]
        return [each for each in members.values() if each.state is SequenceState.RUNNING]

    def lose_reserved(self, sequence: Sequence) -> list[Sequence]:
        """The running samples of the group are preempted: its RESERVED samples become LOST. Returns them."""
        members = self._members.get(sequence.origin.sample_group, {})
        reserved = [each for each in members.values() if each in self._capacity]
        for each in reserved:
            self.settle(each)
            self._lost.add(each.key)
        return reserved

    def lost_with(self, sequence: Sequence) -> list[Sequence]:
        """Returns the sequences that resume together with this one, and itself."""
        members = self._members.get(sequence.origin.sample_group)
        if members is None:
            return [sequence]
        return [
            each
            for each in members.values()
            if self._waits(each) and self._is_lost(each) and each not in self._capacity
        ]

    def _is_fresh(self, sequence: Sequence) -> bool:
        return self._waits(sequence) and sequence not in self._capacity and not self._is_lost(sequence)

    def _is_lost(self, sequence: Sequence) -> bool:
        return bool(sequence.num_preemptions) or sequence.key in self._lost

    @staticmethod
    def _waits(sequence: Sequence) -> bool:
        return sequence.state in (SequenceState.WAITING, SequenceState.ON_HOST)

    # -- capacity -----------------------------------------------------------------------------------------------------

    def followers_of(self, sequence: Sequence) -> dict[Sequence, int]:
        """Returns the samples that are admitted with this one, and for each the blocks that it takes besides. Empty if
        all of them could never run at once: then they are admitted one by one."""
        followers = {each: self._blocks.num_own(each, sequence) for each in self._fresh_with(sequence)}
        num_blocks = self._blocks.num_at_admission(sequence) + sum(followers.values())
        fits = 1 + len(followers) <= self._limits.max_running and num_blocks <= self._blocks.num_usable
        return followers if fits else {}

    def plan_return(self, group: Seq[Sequence]) -> GroupReturn:
        """Plans how a group resumes whose first sample comes first. O(samples x log blocks)."""
        blocks, first = self._blocks, group[0]
        num_common = [0] + [self._num_to_wait_for(each, first) for each in group[1:]]
        reserved = {each: blocks.num_own(each, first) for each, num in zip(group, num_common, strict=True) if num}
        given = [each for each in group if each not in reserved]
        missing = sum(blocks.num_at_admission(each) - blocks.num_cached_blocks(each) for each in given)
        # Also the blocks that running samples of the group need next: otherwise they would preempt the whole group at
        # once, again and again.
        running = self.running_with(first)
        owed = sum(max(0, blocks.num_at_admission(each) - each.table.num_blocks) for each in running)
        return GroupReturn(given, reserved, missing + owed + sum(reserved.values()))

    def num_evictable(self, sequences: Seq[Sequence]) -> int:
        """Returns how many blocks count as available and would be found in the cache and held by these sequences.
        Counts as a use of them. O(blocks)."""
        found = {block for each in sequences for block in self._blocks.cached_prefix(each)}
        return sum(not self._blocks.pool.is_held(block) for block in found)

    def _num_to_wait_for(self, sequence: Sequence, first: Sequence) -> int:
        """Returns the number of blocks that a sequence lacks and that `first` recomputes if it is admitted before."""
        if sequence.state is SequenceState.ON_HOST:
            return 0
        missing = self._blocks.num_in_common(sequence, first) - self._blocks.num_cached_blocks(sequence)
        return max(0, missing)
