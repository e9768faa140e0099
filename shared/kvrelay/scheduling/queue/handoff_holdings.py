"""The slots and blocks that handoffs hold, by tenant, and how much of them a tenant may hold.

A prefill worker holds a prompt's blocks from the prompt's admission until decode has its KV. A decode worker holds
slots and blocks for a handoff until its KV has arrived. No preemption frees these, so a tenant's next handoff waits if

1. another tenant waits, and with it the tenant's handoffs would hold more than its share, or
2. another tenant is here or was here lately, and they would hold more than all but a `KEPT_PART`. So the next request
   of a tenant that is not here finds room.

The first handoff of a tenant may have any size. A block that several handoffs share counts once. While no second tenant
is here or was here lately, nothing is limited.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.queue.fair_shares import FairShares
from kvrelay.scheduling.sequence import Sequence

KEPT_PART = 1 / 8
"""The part of the pool and of the running slots that the handoffs of one tenant leave to others."""


@dataclass(slots=True)
class _TenantHoldings:
    """What the handoffs of one tenant hold: slots, and for each block how many of them hold it."""

    num_slots: int = 0
    blocks: Counter[int] = field(default_factory=Counter)


class HandoffHoldings:
    """The holdings in one worker's pool."""

    def __init__(self, blocks: BlockManager, max_running: int, shares: FairShares) -> None:
        self._blocks = blocks
        self._max_running = max_running
        self._shares = shares
        self._held: dict[str, _TenantHoldings] = {}
        self._entries: dict[SequenceKey, tuple[str, int, list[int]]] = {}  # tenant, slots, blocks
        self._handed_over: set[SequenceKey] = set()

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def num_blocks(self, tenant: str) -> int:
        """Returns the number of blocks that the tenant's handoffs hold."""
        held = self._held.get(tenant)
        return len(held.blocks) if held is not None else 0

    def add(self, sequence: Sequence, num_slots: int = 0) -> None:
        """A handoff has its blocks, and holds slots. O(blocks)."""
        assert sequence.key not in self._entries
        blocks = sequence.table.ids.tolist()
        self._entries[sequence.key] = sequence.tenant, num_slots, blocks
        held = self._held.setdefault(sequence.tenant, _TenantHoldings())
        held.num_slots += num_slots
        held.blocks.update(blocks)

    def keep(self, key: SequenceKey) -> None:
        """The sequence leaves the scheduler, and its handoff holds its blocks until `ended`."""
        if key in self._entries:
            self._handed_over.add(key)

    def left(self, key: SequenceKey) -> None:
        """The sequence holds no blocks in the scheduler any more."""
        if key not in self._handed_over:
            self.ended(key)

    def ended(self, key: SequenceKey) -> None:
        """The handoff holds nothing any more; ignored for an unknown one. O(blocks)."""
        tenant, num_slots, blocks = self._entries.pop(key, ("", 0, []))
        self._handed_over.discard(key)
        if not blocks:
            return
        held = self._held[tenant]
        held.num_slots -= num_slots
        counts = held.blocks
        for block in blocks:
            if counts[block] == 1:
                del counts[block]
            else:
                counts[block] -= 1
        if not counts:
            del self._held[tenant]

    def admits(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence may be admitted, as far as handoffs are limited.

        A tenant that was held up is not owed what it could not use meanwhile."""
        if sequence.remote is None and not sequence.prefill_only:
            return True
        tenant = sequence.tenant
        held = self._held.get(tenant)
        if held is not None and (part := self._part(tenant)) < 1 and not self._fits(sequence, held, part):
            self._shares.hold_up(tenant)
            return False
        self._shares.catch_up(tenant)
        return True

    def _part(self, tenant: str) -> float:
        """The part of the worker that the handoffs of a waiting tenant may hold."""
        shares = self._shares
        if shares.num_waiting_tenants > 1:
            return shares.part(tenant)
        return 1 - KEPT_PART if shares.is_contested or shares.has_recent_tenant else 1.0

    def _fits(self, sequence: Sequence, held: _TenantHoldings, part: float) -> bool:
        num_slots = sequence.num_slots if sequence.remote is not None else 0
        if num_slots and held.num_slots + num_slots > max(1, int(part * self._max_running)):
            return False
        limit = int(part * self._blocks.num_usable)
        num_blocks = len(held.blocks) + blocks_for(sequence.num_tokens, sequence.table.block_size)
        if num_blocks <= limit:
            return True
        if num_blocks - self._blocks.num_cached_blocks(sequence) > limit:
            return False
        return num_blocks - sum(block in held.blocks for block in self._blocks.cached_prefix(sequence)) <= limit

    def check_integrity(self) -> None:
        """Recounts what each tenant holds. Raises AssertionError."""
        assert self._handed_over <= self._entries.keys()
        recounted: dict[str, _TenantHoldings] = {}
        for tenant, num_slots, blocks in self._entries.values():
            held = recounted.setdefault(tenant, _TenantHoldings())
            held.num_slots += num_slots
            held.blocks.update(blocks)
        assert recounted == self._held
