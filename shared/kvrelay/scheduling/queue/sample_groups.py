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

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.sequence import Sequence, SequenceState


class SampleGroups:
    """Who belongs together, of the sequences that a scheduler knows. A sequence without a group is one of its own.

    A sequence that is here for its prompt alone leaves with its first token, whatever becomes of the others: it is in
    none.
    """

    def __init__(self) -> None:
        self._members: dict[str, dict[SequenceKey, Sequence]] = {}
        self._reserved: dict[SequenceKey, int] = {}  # blocks of those RESERVED
        self._lost: set[SequenceKey] = set()  # of those that were reserved
        self.num_reserved_blocks = 0
        """Blocks that are set aside for samples of admitted groups."""

    @property
    def num_reserved_slots(self) -> int:
        """Running sequences that are set aside for samples of admitted groups."""
        return len(self._reserved)

    def enter(self, sequence: Sequence) -> None:
        """The scheduler knows it now."""
        if sequence.sample_group and not sequence.prefill_only:
            self._members.setdefault(sequence.sample_group, {})[sequence.key] = sequence

    def leave(self, sequence: Sequence) -> None:
        """The scheduler has forgotten it."""
        self.settle(sequence)
        members = self._members.get(sequence.sample_group)
        if members is not None:
            members.pop(sequence.key, None)
            if not members:
                del self._members[sequence.sample_group]

    def has_reserved_capacity(self, sequence: Sequence) -> bool:
        """Whether room is set aside for it."""
        return sequence.key in self._reserved

    def fresh_with(self, sequence: Sequence) -> list[Sequence]:
        """Those to set room aside for when this one, which is fresh, is admitted; not itself."""
        members = self._members.get(sequence.sample_group)
        if members is None or not self._is_fresh(sequence):
            return []
        return [each for each in members.values() if each is not sequence and self._is_fresh(each)]

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Sets room aside for a fresh one, until it is settled."""
        self._reserved[sequence.key] = num_blocks
        self.num_reserved_blocks += num_blocks

    def settle(self, sequence: Sequence) -> None:
        """It has its room, or goes."""
        self.num_reserved_blocks -= self._reserved.pop(sequence.key, 0)
        self._lost.discard(sequence.key)

    def running_with(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that go when this one goes, itself included."""
        members = self._members.get(sequence.sample_group)
        if members is None:
            return [sequence]
        return [each for each in members.values() if each.state is SequenceState.RUNNING]

    def lose_reserved(self, sequence: Sequence) -> list[Sequence]:
        """The group's running samples go: those RESERVED are LOST with them. Returns these."""
        members = self._members.get(sequence.sample_group, {})
        reserved = [each for each in members.values() if each.key in self._reserved]
        for each in reserved:
            self.settle(each)
            self._lost.add(each.key)
        return reserved

    def lost_with(self, sequence: Sequence) -> list[Sequence]:
        """Those that come back when this one does, itself included."""
        members = self._members.get(sequence.sample_group)
        if members is None:
            return [sequence]
        return [
            each
            for each in members.values()
            if self._waits(each) and self._is_lost(each) and each.key not in self._reserved
        ]

    def _is_fresh(self, sequence: Sequence) -> bool:
        return self._waits(sequence) and sequence.key not in self._reserved and not self._is_lost(sequence)

    def _is_lost(self, sequence: Sequence) -> bool:
        return bool(sequence.num_preemptions) or sequence.key in self._lost

    @staticmethod
    def _waits(sequence: Sequence) -> bool:
        return sequence.state in (SequenceState.WAITING, SequenceState.SWAPPED)
