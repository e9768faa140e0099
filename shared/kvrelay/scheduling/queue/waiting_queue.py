"""The waiting queue: which sequence the scheduler admits next.

Local prompts and handoffs (`remote_kv`) wait in one queue, in one order. A waiting sequence is in one of four places:

1. RESERVED  capacity is reserved for it (`sample_groups`, `remote_kv`). It is admitted before all others, unless a
             block that it misses is still being computed or sent.
2. RESUMED   it was preempted. Resumed sequences of its owner follow, the latest preempted first.
3. LISTED    it is in the heap of its owner, by (priority, arrival).
4. PARKED    the first block that it misses is being computed by a running sequence, or sent for another handoff. It is
             listed again when that block is published, or when that computation or transfer ends without it.

Priorities may be outdated in one direction only. A cached prefix grows when blocks are published, and exactly the
sequences that miss these blocks (found by hash) get a new priority. It shrinks by eviction, which is noticed when the
sequence reaches the top of the heap. So the top is the best sequence although no step sorts or matches the whole queue:
besides the sequences that it admits, a step looks up at most `PROBES_A_STEP` prefixes, and none if nothing changed.

Starvation bound: once `starvation_bound` other sequences of its owner were admitted since a sequence joined, only
sequences that joined before it, and preempted ones, may be admitted first. It is not parked from then on. So it is
admitted after at most the bound plus the queue's length at its arrival. A sample group counts as one.

Each owner of sequences has a lane of its own. If several wait, `fair_shares` says which is next and which holds too
much to be. With the order `priority` the lane with the most urgent head is next, and the share decides between equals;
a lane that let `starvation_bound` admissions of others pass is next whatever its priority.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from kvrelay.kv.hashing import BlockHash
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.fair_shares import FairShare, FairShares
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.queue_orders import QueueOrder, depth_first
from kvrelay.scheduling.sequence import Sequence

PROBES_A_STEP = 64
REARRANGE_STEPS = 8
REARRANGE_WINDOW = 256
"""At most every `REARRANGE_STEPS` steps, the oldest `REARRANGE_WINDOW` sequences are put in depth-first order."""


LAST = 1 << 62
GONE = -1


@dataclass(slots=True, eq=False)
class QueuedSequence:
    """A sequence in its owner's lane. `joined`: admissions of its owner before it joined."""

    sequence: Sequence
    lane: Lane
    arrival: int
    joined: int
    priority: int = LAST
    version: int = GONE  # matches its only valid place in the heap; GONE if there is none
    missing: BlockHash | None = None  # the first block that is not cached, as far as was looked


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting sequences of one owner. `since`: admissions of all owners when one of this owner was admitted
    last, or when it began to wait."""

    share: FairShare
    since: int
    resumed: deque[Sequence] = field(default_factory=deque)
    entries: OrderedDict[SequenceKey, QueuedSequence] = field(default_factory=OrderedDict)  # ordered by arrival
    heap: list[tuple[int, int, int, QueuedSequence]] = field(default_factory=list)

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
        self.entries = OrderedDict(sorted(self.entries.items(), key=lambda item: item[1].arrival))


class WaitingQueue(Collection[Sequence]):
    """The waiting sequences. `len` and iteration cover all of them, wherever they are."""

    def __init__(
        self,
        order: QueueOrder,
        blocks: BlockManager,
        in_progress: PrefixesInProgress,
        starvation_bound: int,
        shares: FairShares,
    ) -> None:
        self._order = order
        self._blocks = blocks
        self._in_progress = in_progress
        self._starvation_bound = starvation_bound
        self._shares = shares
        self.num_remote = 0
        """Handoffs among the waiting sequences."""
        self._reserved: dict[SequenceKey, Sequence] = {}
        self._reserved_entries: dict[SequenceKey, QueuedSequence] = {}  # those that were LISTED or PARKED before
        self._lanes: dict[str, Lane] = {}  # the sequences that are not RESERVED, by owner
        self._numbers = count()
        self._num_admitted = 0
        self._waits_for: dict[BlockHash, dict[QueuedSequence, None]] = {}
        self._changed: dict[QueuedSequence, None] = {}  # entries whose priority must be computed again
        self._num_parked = 0
        self._probes_left = PROBES_A_STEP
        self._steps_since_arranged = REARRANGE_STEPS
        self._unarranged = False

    def __len__(self) -> int:
        return len(self._reserved) + sum(len(lane.resumed) + len(lane.entries) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane.resumed
        yield from self._reserved.values()
        for lane in self._lanes.values():
            for entry in lane.entries.values():
                yield entry.sequence

    def __contains__(self, sequence: object) -> bool:
        if not isinstance(sequence, Sequence):
            return False
        lane = self._lanes.get(sequence.origin.owner)
        is_in_lane = lane is not None and (sequence.key in lane.entries or sequence in lane.resumed)
        return is_in_lane or sequence.key in self._reserved

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        lane = self._lane_of(sequence)
        entry = QueuedSequence(sequence, lane, next(self._numbers), lane.share.num_admitted)
        lane.entries[sequence.key] = entry
        lane.share.num_waiting_slots += sequence.num_slots
        self.num_remote += sequence.remote is not None
        if self._blocks.shares_prefixes:
            sequence.block_hashes(sequence.num_full_blocks)  # here: a forward hides it, admission is part of a step
        if self._order.depth_first:
            self._unarranged = True
            self._list(entry, LAST)
        else:
            self._list(entry, self._look(entry) if self._order.reads_cache else self._order.priority(sequence, 0))

    def resume(self, sequence: Sequence) -> None:
        """Queues a preempted sequence before all others of its owner."""
        lane = self._lane_of(sequence)
        lane.resumed.appendleft(sequence)
        lane.share.num_waiting_slots += sequence.num_slots

    def _lane_of(self, sequence: Sequence) -> Lane:
        lane = self._lanes.get(sequence.origin.owner)
        if lane is None:
            share = self._shares.begins_to_wait(sequence.origin.owner)
            lane = self._lanes[sequence.origin.owner] = Lane(share, self._num_admitted)
        return lane

    def reserve(self, sequence: Sequence) -> None:
        """Room was set aside for a sequence that waits."""
        entry = self._take_out(sequence)
        if entry is not None:
            self._reserved_entries[sequence.key] = entry
        self._reserved[sequence.key] = sequence

    def withdraw_reservation(self, sequence: Sequence) -> None:
        """Ends the reserved capacity of a sequence, which waits at its old place again. O(waiting)."""
        del self._reserved[sequence.key]
        entry = self._reserved_entries.pop(sequence.key)
        entry.lane = self._lane_of(sequence)
        entry.lane.entries[sequence.key] = entry
        entry.lane.share.num_waiting_slots += sequence.num_slots
        entry.lane.sort_by_arrival()
        self._list(entry, self._look(entry))

    def remove(self, sequence: Sequence) -> None:
        self.num_remote -= sequence.remote is not None
        if self._reserved.pop(sequence.key, None) is not None:
            self._reserved_entries.pop(sequence.key, None)
        else:
            self._take_out(sequence)

    def _take_out(self, sequence: Sequence) -> QueuedSequence | None:
        lane = self._lanes[sequence.origin.owner]
        entry = lane.entries.pop(sequence.key, None)
        if entry is None:
            lane.resumed.remove(sequence)
        else:
            self._unlist(entry)
            self._misses(entry, None)
            self._changed.pop(entry, None)
        lane.share.num_waiting_slots -= sequence.num_slots
        if lane.is_empty:
            del self._lanes[sequence.origin.owner]
            self._shares.stops_waiting(sequence.origin.owner)
        return entry

    def admitted(self, sequence: Sequence) -> None:
        """Takes out a sequence that was admitted: the others have let one pass."""
        is_reserved = sequence.key in self._reserved
        self._shares.admitted(sequence, sequence.num_published * sequence.table.block_size, is_reserved=is_reserved)
        self._num_admitted += not is_reserved
        if not is_reserved:
            self._lanes[sequence.origin.owner].since = self._num_admitted
        self.remove(sequence)

    # -- who is next --------------------------------------------------------------------------------------------------

    def head(self) -> Sequence | None:
        """The sequence to admit next; None if there is none, or all wait for prefixes that others compute."""
        if self._reserved and (sequence := self.reserved_head()) is not None:
            return sequence
        lanes = self._lanes.values()
        first: tuple[Sequence, FairShare] | None = None
        for lane in lanes if len(lanes) == 1 else sorted(lanes, key=self._turn_of):
            if (sequence := self._head_of(lane)) is not None:
                first = first or (sequence, lane.share)
                if self._shares.may_take(lane.share, sequence.num_slots, turn_of=first[1]):
                    return sequence
        return first[0] if first is not None else None

    def _turn_of(self, lane: Lane) -> tuple[int, float, int]:
        """Sorts lanes. Of owners that were served equally, the one that was admitted least recently is first."""
        priority = 0
        if self._order.precedes_shares:
            is_due = self._num_admitted - lane.since >= self._starvation_bound
            top = self._top(lane)
            first = lane.resumed[0].origin.priority if lane.resumed else LAST if top is None else top.priority
            priority = -LAST if is_due else first
        return priority, lane.share.counter, lane.share.last_turn

    def _head_of(self, lane: Lane) -> Sequence | None:
        if lane.resumed:
            return lane.resumed[0]
        oldest = next(iter(lane.entries.values()), None)
        if oldest is not None and lane.share.num_admitted - oldest.joined >= self._starvation_bound:
            return oldest.sequence
        while (entry := self._top(lane)) is not None:
            if not self._blocks.shares_prefixes:
                return entry.sequence
            if self._probes_left <= 0:
                return None if self._in_progress else entry.sequence
            if self._is_next(entry):
                self._probes_left += 1  # only looks in vain are limited
                return entry.sequence
        return None

    @property
    def has_reserved(self) -> bool:
        """Returns whether any waiting sequence has reserved capacity."""
        return bool(self._reserved)

    def reserved_head(self) -> Sequence | None:
        """The first sequence with reserved capacity that may be admitted now: its next block is neither being computed
        nor sent."""
        parked: set[str] = set()
        for sequence in self._reserved.values():
            if sequence.origin.sample_group not in parked:
                if self._blocks.first_missing(sequence)[1] not in self._in_progress:
                    return sequence
                parked.add(sequence.origin.sample_group)  # and with it the others, which share the prompt
        return None

    def renew_probes(self) -> None:
        """Allows as many looks as at the start of a step."""
        self._probes_left = PROBES_A_STEP

    def refresh(self) -> None:
        """A new step: looks again at those whose prefix changed, within the step's probes."""
        self.renew_probes()
        self._steps_since_arranged += 1
        if self._unarranged and self._steps_since_arranged >= REARRANGE_STEPS:
            self._arrange()
        while self._changed and self._probes_left > PROBES_A_STEP // 2:
            self._prioritize_changed()

    def prefixes_changed(self, hashes: Iterable[BlockHash]) -> None:
        """These blocks were published, or their computation was given up."""
        if not self._waits_for:
            return
        for block_hash in hashes:
            entries = self._waits_for.pop(block_hash, None)
            if entries is not None:
                self._changed |= entries

    def check_integrity(self) -> None:
        """Every sequence is in the heap exactly once, unless it is parked for a reason. Raises AssertionError."""
        lanes = self._lanes.values()
        listed = [entry for lane in lanes for _, _, version, entry in lane.heap if version == entry.version]
        assert len(set(listed)) == len(listed)
        parked = {entry for lane in lanes for entry in lane.entries.values()} - set(listed)
        assert not any(lane.is_empty for lane in lanes) and len(lanes) == self._shares.num_waiting_owners
        assert len(parked) == self._num_parked
        for entry in parked:
            assert entry.missing in self._in_progress or entry in self._changed, "parked for nothing"
        assert self.num_remote == sum(sequence.remote is not None for sequence in self)

    # -- priorities ---------------------------------------------------------------------------------------------------

    def _top(self, lane: Lane) -> QueuedSequence | None:
        """The first valid entry of the lane's heap. Parked ones whose block has come are ranked when the heap is
        empty."""
        while True:
            while lane.heap:
                _, _, version, entry = lane.heap[0]
                if version == entry.version:
                    return entry
                heapq.heappop(lane.heap)
            if not self._changed:
                return None
            self._prioritize_changed()

    def _is_next(self, entry: QueuedSequence) -> bool:
        """Whether the heap's top belongs there; else it is parked or moved down."""
        priority = self._look(entry)
        if entry.missing in self._in_progress:
            self._unlist(entry)
            self._num_parked += 1
            return False
        if priority > entry.priority and self._order.reads_cache:
            self._list(entry, priority)
            return False
        return True

    def _prioritize_changed(self) -> None:
        entry = next(iter(self._changed))
        del self._changed[entry]
        was_parked = entry.version == GONE
        priority = self._look(entry)
        if was_parked:
            self._num_parked -= 1
        if was_parked or priority != entry.priority:
            self._list(entry, priority)

    def _look(self, entry: QueuedSequence) -> int:
        """The entry's priority by what is cached now."""
        self._probes_left -= 1
        num_cached, missing = self._blocks.first_missing(entry.sequence)
        self._misses(entry, missing)
        return entry.priority if self._order.depth_first else self._order.priority(entry.sequence, num_cached)

    def _misses(self, entry: QueuedSequence, missing: BlockHash | None) -> None:
        if entry.missing is not None and (others := self._waits_for.get(entry.missing)) is not None:
            others.pop(entry, None)
            if not others:
                del self._waits_for[entry.missing]
        entry.missing = missing
        if missing is not None:
            self._waits_for.setdefault(missing, {})[entry] = None

    def _list(self, entry: QueuedSequence, priority: int) -> None:
        entry.priority, entry.version = priority, next(self._numbers)
        entry.lane.push(entry)

    def _unlist(self, entry: QueuedSequence) -> None:
        if entry.version == GONE:
            self._num_parked -= 1
        entry.version = GONE

    def _arrange(self) -> None:
        self._unarranged, self._steps_since_arranged = False, 0
        for lane in self._lanes.values():
            self._arrange_lane(lane)

    def _arrange_lane(self, lane: Lane) -> None:
        window = list(islice(lane.entries.values(), REARRANGE_WINDOW))
        chains = [entry.sequence.block_hashes(entry.sequence.num_full_blocks) for entry in window]
        for priority, index in enumerate(depth_first(chains)):
            entry = window[index]
            if entry.version == GONE:
                entry.priority = priority
            else:
                self._list(entry, priority)
