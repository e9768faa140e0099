"""Samples of one request that lose and get back their blocks together (Kwon et al., PagedAttention, SOSP 2023, section
4.5): what one of them shares with the others would otherwise stay, for the sake of a few.

They are admitted one by one at first, each when the prefix that they share is there; from then on those that run are
preempted as one, and those that were preempted are resumed as one. Only a gang that does not fit a pool that nobody
else uses is resumed in parts.
"""

from __future__ import annotations

from kvrelay.engine.batch import SequenceKey
from kvrelay.scheduling.sequence import Sequence, SequenceState


class Gangs:
    """Who belongs together, of the sequences that a scheduler knows. A sequence without a gang is one of its own."""

    def __init__(self) -> None:
        self._members: dict[str, dict[SequenceKey, Sequence]] = {}

    def enter(self, sequence: Sequence) -> None:
        """The scheduler knows it now."""
        if sequence.gang:
            self._members.setdefault(sequence.gang, {})[sequence.key] = sequence

    def leave(self, sequence: Sequence) -> None:
        """The scheduler has forgotten it."""
        if sequence.gang:
            members = self._members[sequence.gang]
            del members[sequence.key]
            if not members:
                del self._members[sequence.gang]

    def running_with(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that go when this one goes, itself included."""
        if not sequence.gang:
            return [sequence]
        return [each for each in self._members[sequence.gang].values() if each.state is SequenceState.RUNNING]

    def preempted_with(self, sequence: Sequence) -> list[Sequence]:
        """The preempted sequences that come back when this one does, itself included."""
        if not sequence.gang:
            return [sequence]
        return [
            each
            for each in self._members[sequence.gang].values()
            if each.state in (SequenceState.WAITING, SequenceState.SWAPPED) and each.num_preemptions
        ]
