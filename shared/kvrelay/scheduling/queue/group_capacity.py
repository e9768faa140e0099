"""The room that a group takes: what is set aside for those of its samples that are admitted later, and what all need
that come back. Counted here; given, or not, by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.queue.sample_groups import SampleGroups
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class GroupReturn:
    """A group that comes back as one."""

    given: list[Sequence]
    """They get their blocks at once."""
    reserved: dict[Sequence, int]
    """They wait for what the first computes; with the blocks that are set aside for each."""
    num_blocks: int
    """That must be available, if nothing of it is held that is cached."""


class GroupCapacity:
    """Of the groups of one scheduler."""

    def __init__(self, groups: SampleGroups, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self._groups = groups
        self._blocks = blocks
        self._limits = limits

    def of_followers(self, sequence: Sequence) -> dict[Sequence, int]:
        """The samples that are admitted with this one, and the blocks that each takes beside it. Without those that
        could never run at once: they come later, one by one."""
        followers = {each: self._blocks.num_own(each, sequence) for each in self._groups.fresh_with(sequence)}
        num_blocks = self._blocks.num_at_admission(sequence) + sum(followers.values())
        fits = 1 + len(followers) <= self._limits.max_running and num_blocks <= self._blocks.pool.num_blocks
        return followers if fits else {}

    def of_return(self, group: Seq[Sequence]) -> GroupReturn:
        """All of those that were lost together, the first of them first. O(samples x log blocks)."""
        blocks, first = self._blocks, group[0]
        num_common = [0] + [self._num_to_wait_for(each, first) for each in group[1:]]
        reserved = {each: blocks.num_own(each, first) for each, num in zip(group, num_common, strict=True) if num}
        given = [each for each in group if each not in reserved]
        missing = sum(blocks.num_at_admission(each) - blocks.num_cached_blocks(each) for each in given)
        # What those that run will take next, too: else they would have to preempt the whole group at once, for ever.
        running = self._groups.running_with(first)
        owed = sum(max(0, blocks.num_at_admission(each) - each.table.num_blocks) for each in running)
        return GroupReturn(given, reserved, missing + owed + sum(reserved.values()))

    def num_evictable(self, sequences: Seq[Sequence]) -> int:
        """Blocks that count as available, and that these would find cached and hold; a use of them. O(blocks)."""
        found = {block for each in sequences for block in self._blocks.cached_prefix(each)}
        return sum(not self._blocks.pool.is_held(block) for block in found)

    def _num_to_wait_for(self, sequence: Sequence, first: Sequence) -> int:
        """Blocks that a sequence lacks, and that another one computes if it is admitted before."""
        if sequence.state is SequenceState.SWAPPED:
            return 0
        missing = self._blocks.num_in_common(sequence, first) - self._blocks.num_cached_blocks(sequence)
        return max(0, missing)
