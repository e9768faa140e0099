"""Takes running slots and blocks back from tenants that hold more than their share, for a tenant that holds less.

The queue decides who is next, but a slot is free only when a sequence ends. So a tenant with many long outputs would
keep all slots for as long as these last. The head of the queue claims what it lacks if

1. with it, its tenant holds no more than its share of what is lacking (slots, blocks, or both), and
2. its tenant was served more than `RECLAIM_LAG` tokens less, over its weight, than the tenant that loses.

The tenant that was served most loses its latest admitted sequences first, and never so many that it holds less than its
share. So no tenant takes back what it has just lost, and a tenant's oldest sequences continue. Sequences are preempted
only if that is enough for the head. They keep their output, and are recomputed or swapped like any others.

A share is `max_running` slots, or all blocks, times the tenant's weight over the weights of all tenants here, and at
least one slot. If a tenant does not need its share, the others use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import NeedsCommit, PlanDraft
from kvrelay.scheduling.preemptor import Preemptor
from kvrelay.scheduling.sequence import Sequence


@dataclass(slots=True)
class Room:
    """Running slots and blocks: what tenants hold, what is lacking."""

    num_slots: int = 0
    num_blocks: int = 0

    def add(self, sequence: Sequence, num_slots: int = 1) -> None:
        self.num_slots += num_slots
        self.num_blocks += sequence.table.num_blocks


class Reclaimer:
    """Reclaims for the head of one scheduler's queue.

    `priority_first`: the queue's order is by priority, so that a preempted sequence may be ahead of the head.
    """

    def __init__(self, lifecycle: SequenceLifecycle, preemptor: Preemptor, *, priority_first: bool) -> None:
        self._lifecycle = lifecycle
        self._shares = lifecycle.shares
        self._preemptor = preemptor
        self._priority_first = priority_first
        self.num_reclaimed = 0

    def make_way(self, head: Sequence, wanted: Room, lacking: Room, draft: PlanDraft) -> bool:
        """Preempts sequences of other tenants until the head of the queue fits. Returns whether it did.

        `wanted`: what the head takes. `lacking`: the part of it that is not available. Raises NeedsCommit instead of
        preempting if the draft is for a step behind the one in flight. O(running).
        """
        served_more = self._shares.served_more(head.tenant)
        if not served_more:
            return False
        held = self._held_by_tenants()
        own = held.get(head.tenant) or Room()
        share = self._share(head.tenant)
        if lacking.num_slots > 0 and own.num_slots + wanted.num_slots > share.num_slots:
            return False
        if lacking.num_blocks > 0 and own.num_blocks + wanted.num_blocks > share.num_blocks:
            return False
        victims: list[Sequence] = []
        for tenant in served_more:
            if tenant in held:
                victims += self._victims(tenant, head, held[tenant], lacking, draft.admitted)
        if lacking.num_slots > 0 or lacking.num_blocks > 0:
            return False
        if draft.ahead:
            raise NeedsCommit
        for victim in victims:
            self._preemptor.preempt_group(victim, draft)
        self.num_reclaimed += len(victims)
        return True

    def _held_by_tenants(self) -> dict[str, Room]:
        held: dict[str, Room] = {}
        for sequence in self._lifecycle.running.values():
            held.setdefault(sequence.tenant, Room()).add(sequence)
        for sequence in self._lifecycle.remote.receiving.values():
            held.setdefault(sequence.tenant, Room()).add(sequence, sequence.num_slots)
        return held

    def _share(self, tenant: str) -> Room:
        part = self._shares.part(tenant)
        num_slots = max(1, int(self._lifecycle.limits.max_running * part))
        return Room(num_slots, int(self._lifecycle.blocks.num_usable * part))

    def _victims(
        self, tenant: str, head: Sequence, held: Room, lacking: Room, admitted: Collection[Sequence]
    ) -> Iterator[Sequence]:
        """Yields one sequence of each group to preempt, the latest admitted first, and reduces `lacking`."""
        share, seen = self._share(tenant), set[Sequence]()
        for sequence in reversed(self._lifecycle.running.values()):
            if lacking.num_slots <= 0 and lacking.num_blocks <= 0:
                return
            if sequence.tenant != tenant or sequence in seen:
                continue
            group = self._preempted_with(sequence)
            seen.update(group)
            # A prompt that is computed for a handoff ends with its first token, and its blocks are being sent.
            is_kept = sequence.prefill_only or any(each in admitted for each in group)
            if is_kept or (self._priority_first and any(each.priority < head.priority for each in group)):
                continue
            loss = Room(len(group), sum(self._num_own_blocks(each) for each in group))
            frees_slots = lacking.num_slots > 0 and held.num_slots - loss.num_slots >= share.num_slots
            frees_blocks = lacking.num_blocks > 0 and held.num_blocks - loss.num_blocks >= share.num_blocks
            if frees_slots or (frees_blocks and loss.num_blocks):
                for room in (held, lacking):
                    room.num_slots -= loss.num_slots
                    room.num_blocks -= loss.num_blocks
                yield sequence

    def _preempted_with(self, sequence: Sequence) -> list[Sequence]:
        if sequence.beams is not None:
            return [each for each in self._lifecycle.running.values() if each.beams is sequence.beams]
        return self._lifecycle.sample_groups.running_with(sequence)

    def _num_own_blocks(self, sequence: Sequence) -> int:
        """Returns the number of blocks that only this sequence holds: a shared prefix is not freed. O(log blocks)."""
        return sequence.table.num_blocks - self._lifecycle.blocks.num_shared(sequence)
