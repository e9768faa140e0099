"""The waiting sequences of one tenant. `WaitingQueue` orders them, and chooses between tenants."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from kvrelay.kv.hashing import BlockHash
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.queue.fair_shares import TenantShare
from kvrelay.scheduling.sequence import Sequence

LAST = 1 << 62
GONE = -1


@dataclass(slots=True, eq=False)
class QueuedSequence:
    sequence: Sequence
    lane: TenantLane
    arrival: int
    joined: int  # admissions of its tenant before it joined
    priority: int = LAST
    version: int = GONE  # matches its only valid place in the heap; GONE if there is none
    missing: BlockHash | None = None  # the first block that is not cached, as far as was looked


@dataclass(slots=True, eq=False)
class TenantLane:
    """`since`: admissions of all tenants when one of this tenant was admitted last, or when it began to wait."""

    share: TenantShare
    since: int
    resumed: deque[Sequence] = field(default_factory=deque)
    entries: dict[SequenceKey, QueuedSequence] = field(default_factory=dict)  # ordered by arrival
    heap: list[tuple[int, int, int, QueuedSequence]] = field(default_factory=list)
    # (arrival, number, entry): all entries but LIMITED ones, and outdated places
    by_arrival: list[tuple[int, int, QueuedSequence]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.resumed

    def push(self, entry: QueuedSequence) -> None:
        """Puts an entry into the heap, at the place of its priority and version."""
        heapq.heappush(self.heap, (entry.priority, entry.arrival, entry.version, entry))
        if len(self.heap) > 64 + 2 * len(self.entries):  # mostly outdated places
            self.heap = [place for place in self.heap if place[2] == place[3].version]
            heapq.heapify(self.heap)

    def sort_by_arrival(self) -> None:
        self.entries = dict(sorted(self.entries.items(), key=lambda item: item[1].arrival))
