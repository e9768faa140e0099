"""Takes running slots and blocks back from tenants that hold more than their share, for a tenant that holds less.

The queue decides who is next, but a slot is free only when a sequence ends. So a tenant with many long outputs would
keep all slots for as long as these last. The head of the queue claims what it lacks if

1. with it, its tenant holds no more than its share of what is lacking (slots, blocks, or both), and
2. its tenant was served more than `RECLAIM_LAG` tokens less, over its weight, than the tenant that loses.

The tenant that was served most loses its latest admitted sequences first, and never so many that it holds less than its
share. So no tenant takes back what it has just lost, and a tenant's oldest sequences continue. Sequences are preempted
only if that is enough for the head. They keep their output, and are recomputed or swapped like any others. Prompts that
are computed for a handoff and beam searches are not preempted.

A share is `max_running` slots, or all blocks, times the tenant's weight over the weights of all tenants here, and at
least one slot. If a tenant does not need its share, the others use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvrelay.kv.table import BlockTable
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import NeedsCommit, PlanDraft
from kvrelay.scheduling.preemptor import Preemptor
from kvrelay.scheduling.sequence import Sequence


@dataclass(slots=True)
class Room:
    """Numbers of running slots and blocks that a tenant holds, or that are lacking."""

    num_slots: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class _Holding:
    """What a tenant holds, and its running sequences in the order of their admission. Until `count_blocks`, a block
    that several sequences share counts once for each."""

    room: Room = field(default_factory=Room)
    running: list[Sequence] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)

    def add(self, sequence: Sequence, num_slots: int = 1) -> None:
        self.room.num_slots += num_slots
        self.room.num_blocks += sequence.table.num_blocks
        self.tables.append(sequence.table)

    def count_blocks(self, num_pool_blocks: int) -> None:
        """Counts shared blocks once. O(blocks)."""
        is_held = np.zeros(num_pool_blocks, dtype=np.bool_)
        for table in self.tables:
            is_held[table.ids] = True
        self.room.num_blocks = int(np.count_nonzero(is_held))


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

        `wanted`: what the head takes. `lacking`: the part of it that is not available. If the head is on the host, its
        copy stays there. Raises NeedsCommit instead of preempting if the draft is for a step behind the one in flight.
        O(running + tenants log tenants), and O(blocks) of tenants that may hold more than their share of blocks.
        """
        served_more = self._shares.served_more(head.tenant)
        if not served_more:
            return False
        held, total_weight = self._held_by_tenants(), self._shares.total_weight
        own = held.get(head.tenant, _Holding())
        share = self._share(head.tenant, total_weight)
        if lacking.num_slots > 0 and own.room.num_slots + wanted.num_slots > share.num_slots:
            return False
        most_blocks = share.num_blocks - wanted.num_blocks
        if lacking.num_blocks > 0 and not self._holds_at_most(own, most_blocks):
            return False
        victims: list[Sequence] = []
        for tenant in served_more:
            if tenant in held and self._exceeds(held[tenant], share := self._share(tenant, total_weight), lacking):
                victims += self._victims(held[tenant], share, head, lacking, draft.admitted)
        if lacking.num_slots > 0 or lacking.num_blocks > 0:
            return False
        if draft.ahead:
            raise NeedsCommit
        draft.served = self._lifecycle.sample_groups.lost_with(head)
        for victim in victims:
            self._preemptor.preempt_group(victim, draft)
        self.num_reclaimed += len(victims)
        return True

    def _held_by_tenants(self) -> dict[str, _Holding]:
        held: dict[str, _Holding] = {}
        for sequence in self._lifecycle.running.values():
            holding = held.setdefault(sequence.tenant, _Holding())
            holding.add(sequence)
            holding.running.append(sequence)
        for sequence in self._lifecycle.remote.receiving.values():
            held.setdefault(sequence.tenant, _Holding()).add(sequence, sequence.num_slots)
        return held

    def _holds_at_most(self, holding: _Holding, num_blocks: int) -> bool:
        """O(blocks) if it holds more with shared blocks counted more than once."""
        if holding.room.num_blocks > num_blocks:
            holding.count_blocks(self._lifecycle.blocks.pool.num_blocks)
        return holding.room.num_blocks <= num_blocks

    def _exceeds(self, holding: _Holding, share: Room, lacking: Room) -> bool:
        """Returns whether the tenant holds more than its share of what is lacking."""
        has_too_many_blocks = lacking.num_blocks > 0 and not self._holds_at_most(holding, share.num_blocks)
        return has_too_many_blocks or (lacking.num_slots > 0 and holding.room.num_slots > share.num_slots)

    def _share(self, tenant: str, total_weight: float) -> Room:
        weight = self._shares.of(tenant).weight
        num_slots = int(self._lifecycle.limits.max_running * weight / total_weight)
        return Room(max(1, num_slots), int(self._lifecycle.blocks.num_usable * weight / total_weight))

    def _victims(
        self, holding: _Holding, share: Room, head: Sequence, lacking: Room, admitted: Collection[Sequence]
    ) -> Iterator[Sequence]:
        """Yields one sequence of each group to preempt, the latest admitted first, and reduces `lacking`."""
        held, seen = holding.room, set[Sequence]()
        for sequence in reversed(holding.running):
            if lacking.num_slots <= 0 and lacking.num_blocks <= 0:
                return
            if sequence in seen:
                continue
            group = self._lifecycle.sample_groups.running_with(sequence)
            seen.update(group)
            # A prompt that is computed for a handoff ends with its first token, and its blocks are being sent. What the
            # beams of a search share is freed with the last of them only.
            is_kept = sequence.prefill_only or sequence.beams is not None or any(each in admitted for each in group)
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

    def _num_own_blocks(self, sequence: Sequence) -> int:
        """Returns the number of blocks that only this sequence holds: a shared prefix is not freed. O(log blocks)."""
        return sequence.table.num_blocks - self._lifecycle.blocks.num_shared(sequence)
