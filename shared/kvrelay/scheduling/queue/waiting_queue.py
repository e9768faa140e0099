"""The waiting queue: which sequence the scheduler admits next.

Local prompts and handoffs (`remote_kv`) wait in one queue, in one order. A waiting sequence is in one of five places:

1. RESERVED  capacity is reserved for it (`sample_groups`, `remote_kv`). It is admitted before all others, unless a
             block that it misses is still being computed or sent.
2. RESUMED   it was preempted. Resumed sequences follow, the latest preempted first.
3. LISTED    it is in a heap, by (priority, arrival).
4. PARKED    the first block that it misses is being computed by a running sequence, or sent for another handoff. It is
             listed again when that block is published, or when that computation or transfer ends without it.
5. LIMITED   its sender holds its share of the pool (`sender_limits`). It is listed again when blocks of that sender are
             released.

Priorities may be outdated in one direction only. A cached prefix grows when blocks are published, and exactly the
sequences that miss these blocks (found by hash) get a new priority. It shrinks by eviction, which is noticed when the
sequence reaches the top of the heap. So the top is the best sequence although no step sorts or matches the whole queue:
besides the sequences that it admits, a step looks up at most `PROBES_A_STEP` prefixes, and none if nothing changed.

Starvation bound: once `starvation_bound` other sequences were admitted since a sequence joined, only sequences that
joined before it, and preempted ones, may be admitted first. It is not parked from then on. So it is admitted after at
most the bound plus the queue's length at its arrival. A sample group counts as one. The bound does not hold for a
sequence while it is LIMITED: a sender that has stopped for good would hold up all others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.queue.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.queue_orders import QueueOrder, depth_first
from kvrelay.scheduling.queue.sender_limits import SenderLimits
from kvrelay.scheduling.sequence import Sequence

PROBES_A_STEP = 64
REARRANGE_STEPS = 8
REARRANGE_WINDOW = 256
"""At most every `REARRANGE_STEPS` steps, the oldest `REARRANGE_WINDOW` sequences are put in depth-first order."""

_LAST = 1 << 62
_GONE = -1


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: Sequence
    arrival: int
    joined: int  # admissions before it joined
    priority: int = _LAST
    version: int = _GONE  # matches its only valid place in the heap; _GONE if there is none
    missing: BlockHash | None = None  # the first block that is not cached, as far as was looked


class WaitingQueue(Collection[Sequence]):
    """The waiting sequences. `len` and iteration cover all of them, wherever they are."""

    def __init__(
        self,
        order: QueueOrder,
        blocks: BlockManager,
        in_progress: PrefixesInProgress,
        starvation_bound: int,
        senders: SenderLimits,
    ) -> None:
        self._order = order
        self._blocks = blocks
        self._in_progress = in_progress
        self._starvation_bound = starvation_bound
        self._senders = senders
        self.num_remote = 0
        """Handoffs among the waiting sequences."""
        self._reserved: dict[SequenceKey, Sequence] = {}
        self._reserved_entries: dict[SequenceKey, _Entry] = {}  # RESERVED sequences that were LISTED or PARKED before
        self._limited: dict[_Entry, None] = {}  # parked because their sender holds its share of the pool
        self._resumed: deque[Sequence] = deque()
        self._entries: dict[SequenceKey, _Entry] = {}  # ordered by arrival
        self._heap: list[tuple[int, int, int, _Entry]] = []
        self._numbers = count()
        self._num_admitted = 0
        self._waits_for: dict[BlockHash, dict[_Entry, None]] = {}
        self._changed: dict[_Entry, None] = {}  # entries whose priority must be computed again
        self._num_parked = 0
        self._probes_left = PROBES_A_STEP
        self._steps_since_arranged = REARRANGE_STEPS
        self._unarranged = False

    def __len__(self) -> int:
        return len(self._reserved) + len(self._resumed) + len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed
        yield from self._reserved.values()
        for entry in self._entries.values():
            yield entry.sequence

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and (
            sequence.key in self._entries or sequence.key in self._reserved or sequence in self._resumed
        )

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues an arrival."""
        entry = self._entries[sequence.key] = _Entry(sequence, next(self._numbers), self._num_admitted)
        self.num_remote += sequence.remote is not None
        if self._blocks.shares_prefixes:
            sequence.block_hashes(sequence.num_full_blocks)  # here: a forward hides it, admission is part of a step
        if self._order.depth_first:
            self._unarranged = True
            self._list(entry, _LAST)
        else:
            self._list(entry, self._look(entry) if self._order.reads_cache else self._order.priority(sequence, 0))

    def resume(self, sequence: Sequence) -> None:
        """Queues a preempted sequence before all others."""
        self._resumed.appendleft(sequence)

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
        self._entries[sequence.key] = entry
        self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1].arrival))
        self._list(entry, self._look(entry))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        self.num_remote -= sequence.remote is not None
        if self._reserved.pop(sequence.key, None) is not None:
            self._reserved_entries.pop(sequence.key, None)
        else:
            self._take_out(sequence)

    def _take_out(self, sequence: Sequence) -> _Entry | None:
        entry = self._entries.pop(sequence.key, None)
        if entry is None:
            self._resumed.remove(sequence)
            return None
        self._unlist(entry)
        self._limited.pop(entry, None)
        self._misses(entry, None)
        self._changed.pop(entry, None)
        return entry

    def admitted(self, sequence: Sequence) -> None:
        """Takes out a sequence that was admitted: the others have let one pass."""
        self._num_admitted += sequence.key not in self._reserved
        self.remove(sequence)

    # -- who is next --------------------------------------------------------------------------------------------------

    def head(self) -> Sequence | None:
        """The sequence to admit next; None when there is none, or all wait for prefixes that others compute."""
        if self._reserved and (sequence := self.reserved_head()) is not None:
            return sequence
        if self._resumed:
            return self._resumed[0]
        oldest = self._oldest()
        if oldest is None:
            return None
        if self._num_admitted - oldest.joined >= self._starvation_bound:
            return oldest.sequence
        while (entry := self._top()) is not None:
            if self._is_limited(entry.sequence):
                self._park_limited(entry)
                continue
            if not self._blocks.shares_prefixes:
                return entry.sequence
            if self._probes_left <= 0:
                return None if self._in_progress else entry.sequence
            if self._is_next(entry):
                self._probes_left += 1  # only looks in vain are limited
                return entry.sequence
        return None

    def _oldest(self) -> _Entry | None:
        """The entry that joined first, without LIMITED ones."""
        for entry in self._entries.values():
            if entry in self._limited:
                continue
            if not self._is_limited(entry.sequence):
                return entry
            self._park_limited(entry)
        return None

    @property
    def has_reserved(self) -> bool:
        """Whether any waiting sequence has reserved capacity."""
        return bool(self._reserved)

    def reserved_head(self) -> Sequence | None:
        """The first sequence with reserved capacity that may be admitted now: its next block is neither being computed
        nor sent, and its sender is within its limit."""
        parked: set[str] = set()
        for sequence in self._reserved.values():
            if sequence.sample_group not in parked and not self._is_limited(sequence):
                if self._blocks.first_missing(sequence)[1] not in self._in_progress:
                    return sequence
                parked.add(sequence.sample_group)  # and with it the others, which share the prompt
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

    def sender_changed(self, sender: PeerRef) -> None:
        """Blocks that were reserved for a sender have been released."""
        for entry in [entry for entry in self._limited if _sender(entry.sequence) == sender]:
            del self._limited[entry]
            self._changed[entry] = None

    def check_integrity(self) -> None:
        """Every sequence is in the heap exactly once, unless it is parked for a reason. Raises AssertionError."""
        listed = [entry for _, _, version, entry in self._heap if version == entry.version]
        assert len(set(listed)) == len(listed)
        parked = set(self._entries.values()) - set(listed)
        assert len(parked) == self._num_parked
        for entry in parked:
            is_waiting = entry in self._limited or entry.missing in self._in_progress
            assert is_waiting or entry in self._changed, "parked for nothing"
        assert self.num_remote == sum(sequence.remote is not None for sequence in self)

    # -- priorities ---------------------------------------------------------------------------------------------------

    def _top(self) -> _Entry | None:
        """The heap's first valid entry. Parked ones whose block has come are ranked when nothing else is left."""
        while True:
            while self._heap:
                _, _, version, entry = self._heap[0]
                if version == entry.version:
                    return entry
                heapq.heappop(self._heap)
            if not self._changed:
                return None
            self._prioritize_changed()

    def _is_next(self, entry: _Entry) -> bool:
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

    def _is_limited(self, sequence: Sequence) -> bool:
        """Whether the blocks that a handoff misses are more than its sender may hold now."""
        remote = sequence.remote
        if remote is None or not remote.is_limited:
            return False
        num_missing = blocks_for(sequence.num_tokens, sequence.table.block_size)
        num_missing -= self._blocks.num_cached_blocks(sequence)
        return not self._senders.allows(remote.sender, num_missing)

    def _park_limited(self, entry: _Entry) -> None:
        self._unlist(entry)
        self._num_parked += 1
        self._limited[entry] = None

    def _prioritize_changed(self) -> None:
        entry = next(iter(self._changed))
        del self._changed[entry]
        was_parked = entry.version == _GONE
        priority = self._look(entry)
        if was_parked:
            self._num_parked -= 1
        if was_parked or priority != entry.priority:
            self._list(entry, priority)

    def _look(self, entry: _Entry) -> int:
        """The entry's priority by what is cached now."""
        self._probes_left -= 1
        num_cached, missing = self._blocks.first_missing(entry.sequence)
        self._misses(entry, missing)
        return entry.priority if self._order.depth_first else self._order.priority(entry.sequence, num_cached)

    def _misses(self, entry: _Entry, missing: BlockHash | None) -> None:
        if entry.missing is not None and (others := self._waits_for.get(entry.missing)) is not None:
            others.pop(entry, None)
            if not others:
                del self._waits_for[entry.missing]
        entry.missing = missing
        if missing is not None:
            self._waits_for.setdefault(missing, {})[entry] = None

    def _list(self, entry: _Entry, priority: int) -> None:
        self._limited.pop(entry, None)
        entry.priority, entry.version = priority, next(self._numbers)
        heapq.heappush(self._heap, (priority, entry.arrival, entry.version, entry))
        if len(self._heap) > 64 + 2 * len(self._entries):  # mostly outdated places
            self._heap = [place for place in self._heap if place[2] == place[3].version]
            heapq.heapify(self._heap)

    def _unlist(self, entry: _Entry) -> None:
        if entry.version == _GONE:
            self._num_parked -= 1
        entry.version = _GONE

    def _arrange(self) -> None:
        self._unarranged, self._steps_since_arranged = False, 0
        window = list(islice(self._entries.values(), REARRANGE_WINDOW))
        chains = [entry.sequence.block_hashes(entry.sequence.num_full_blocks) for entry in window]
        for priority, index in enumerate(depth_first(chains)):
            entry = window[index]
            if entry.version == _GONE:
                entry.priority = priority
            else:
                self._list(entry, priority)


def _sender(sequence: Sequence) -> PeerRef | None:
    return sequence.remote.sender if sequence.remote is not None else None
