"""Preemption by swapping: the scheduler's side of the host's swap space. Bookkeeping only, no tensors.

Peers may write one-sidedly into blocks that are granted to them. These rules make swapping safe beside such writes:

1. Only committed KV of running sequences is copied out, never a reservation's blocks, nor those of a sequence that only
   computes its prompt for a handoff (a transfer may read them).
2. A step copies out, then in, then computes. So rows of a step may use the blocks that it copies out.
3. From the plan until the step has ended, every block that its copies read or write is held as `in_flight` besides
   other holds. So it is neither evicted nor granted.
4. A slot that a step copies in is held until that step has ended, so that no copy out can overwrite the slot.
5. A copy belongs to a queued sequence, or to the step that copies it in. Its slots are freed once: when the step ends,
     when the sequence ends, or when the copy is dropped.

A copy is whole, so a resumed sequence recomputes nothing. On the way back it shares blocks that are still in the prefix
cache. If the swap space is full, copies of sequences that resume later are dropped, the last one first.

Whether a sequence is swapped is estimated (Kwon et al., SOSP 2023, sections 4.5 and 7.3). Recomputation costs the time
for tokens whose KV is lost by the time the sequence is resumed. Swapping costs the time to copy the blocks to the host,
and to copy the lost ones back. Not all KV is lost: blocks that other running sequences hold stay, and the prefix cache
keeps those that were not needed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.kv.cache import BlockError, IntegrityError, OutOfBlocks
from kvrelay.kv.free_runs import FreeRuns
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import HostCopy, HostCopyPlan, PlanBuilder, StepPlan, work_of
from kvrelay.scheduling.scheduler_settings import Preemption, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_cost import CalibratedCost, StepCost, pairs
from kvrelay.step.batch import HostCopies

SWAP_PART = 4
"""The swap space is the pool's size divided by this, unless it is configured."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Where some blocks lie: `slots[i]` is the i-th one's. `new`: the indices of those that are to be copied there."""

    slots: tuple[int, ...]
    new: tuple[int, ...]


class SwapSpace:
    """`num_slots` slots, all free at first. Every operation checks before it changes anything."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"no swap space of {num_slots} slots")
        self.num_slots = num_slots
        self._free_runs = FreeRuns(num_slots)
        self._num_holders = [0] * num_slots
        self._hash: list[BlockHash | None] = [None] * num_slots
        self._slot_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """The number of slots without a hold."""
        return self._free_runs.num_free

    @property
    def num_used(self) -> int:
        """The number of slots with a hold."""
        return self.num_slots - self._free_runs.num_free

    def num_new(self, hashes: Seq[BlockHash | None]) -> int:
        """Slots that `store` would take: those of the blocks that are not here yet."""
        return sum(block_hash is None or block_hash not in self._slot_of for block_hash in hashes)

    def store(self, hashes: Seq[BlockHash | None]) -> StoredBlocks:
        """Holds a slot for each block, in the order of a sequence's table; None: a block that is not full.

        The hashes differ from each other, as those of a chain do. Raises OutOfBlocks.
        """
        new = [i for i, block_hash in enumerate(hashes) if block_hash is None or block_hash not in self._slot_of]
        if len(new) > self.num_free:
            raise OutOfBlocks(len(new), self.num_free)
        fresh = iter(self._free_runs.take(len(new)))
        is_new = set(new)
        slots = []
        for index, block_hash in enumerate(hashes):
            if index in is_new or block_hash is None:
                slot = next(fresh)
                self._hash[slot] = block_hash
                if block_hash is not None:
                    self._slot_of[block_hash] = slot
            else:
                slot = self._slot_of[block_hash]
            self._num_holders[slot] += 1
            slots.append(slot)
        return StoredBlocks(tuple(slots), tuple(new))

    def release(self, slots: Seq[int]) -> None:
        """Drops one hold of each slot; the last one frees it. Raises BlockError for a slot without a hold."""
        if len(set(slots)) != len(slots):
            raise BlockError("a slot is named twice in one operation")
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._num_holders[slot]:
                raise BlockError(f"slot {slot} is not held")
        freed = []
        for slot in slots:
            self._num_holders[slot] -= 1
            if not self._num_holders[slot]:
                freed.append(slot)
                if (block_hash := self._hash[slot]) is not None:
                    del self._slot_of[block_hash]
                    self._hash[slot] = None
        self._free_runs.give_back(freed)

    def num_released_by(self, slots: Seq[int], keep: Seq[BlockHash | None] = ()) -> int:
        """Slots that `release` would free, less those that hold one of the blocks in `keep`."""
        kept = {block_hash for block_hash in keep if block_hash is not None}
        return sum(self._num_holders[slot] == 1 and self._hash[slot] not in kept for slot in slots)

    def check_integrity(self) -> None:
        """Recounts holders, hashes and free slots. O(num_slots). Raises IntegrityError."""
        free = self._free_runs.check_integrity()
        for slot, num_holders in enumerate(self._num_holders):
            if num_holders < 0 or (num_holders == 0) != (slot in free):
                raise IntegrityError(f"slot {slot} has {num_holders} holders, the free runs say otherwise")
            block_hash = self._hash[slot]
            if block_hash is not None and (not num_holders or self._slot_of.get(block_hash) != slot):
                raise IntegrityError(f"slot {slot}: its hash leads elsewhere")
            if block_hash is None and num_holders > 1:
                raise IntegrityError(f"slot {slot}: a part-filled block has {num_holders} holders")
        if len(self._slot_of) != sum(block_hash is not None for block_hash in self._hash):
            raise IntegrityError("hashes lead to slots that do not have them")


COPY_BLOCK_S = 25e-6
"""Used until a copy was measured: 100 KB at 4 GB/s."""
WEIGHT = 0.25
"""Weight of the latest observation in a running mean."""


@dataclass(slots=True)
class SwapUse:
    """Use of the swap space. Sums since the start, except the last three: slots, slots in use, and swapped
    sequences."""

    num_preemptions: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0
    num_dropped: int = 0
    copy_s: float = 0.0
    num_slots: int = 0
    num_used_slots: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence about to lose its blocks. `num_computed` and `num_shared` are tokens; `num_shared`: the prefix that
    other sequences hold."""

    num_computed: int
    num_shared: int
    num_new_blocks: int  # blocks without a copy in the swap space

    def num_lost(self, lost_share: float, block_size: int) -> int:
        """Returns the number of tokens whose KV is lost if `lost_share` of the blocks that only this sequence holds are
        evicted, the last ones first."""
        num_own_blocks = self.num_computed // block_size - self.num_shared // block_size
        return self.num_computed - self.num_shared - int((1 - lost_share) * num_own_blocks) * block_size


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times in seconds."""

    recompute_s: float
    out_s: float
    back_s: float

    @property
    def gain_s(self) -> float:
        """The time that swapping saves; negative if recomputing is faster."""
        return self.recompute_s - self.out_s - self.back_s

    @property
    def gain_of_copy_s(self) -> float:
        """The time that a copy already made saves."""
        return self.recompute_s - self.back_s


def estimate(preempted: Preempted, cost: StepCost, block_s: float, lost_share: float, block_size: int) -> Estimate:
    """Estimates the time of recomputing and of swapping. `block_s`: seconds to copy a block one way. The fixed cost of
    a step counts for neither, as other sequences run in the same steps."""
    num_lost = preempted.num_lost(lost_share, block_size)
    position = preempted.num_computed - num_lost
    recompute_s = cost.token_s * num_lost + cost.pair_s * pairs(position, num_lost)
    return Estimate(recompute_s, block_s * preempted.num_new_blocks, block_s * blocks_for(num_lost, block_size))


def prefers_swap(preemption: Preemption, estimate: Estimate, dropped_s: float) -> bool:
    """Returns whether to swap. `dropped_s`: the time that is lost with copies which must be dropped to make room."""
    return preemption == "swap" or (preemption == "auto" and estimate.gain_s > dropped_s)


class RunningMean:
    """An exponentially weighted mean with an initial guess."""

    def __init__(self, guess: float) -> None:
        self.value = guess

    def observe(self, value: float) -> None:
        self.value += WEIGHT * (value - self.value)


class Swapper:
    """Plans copies to and from the host for one scheduler. Never copies without slots, or with `recompute`."""

    def __init__(self, blocks: BlockManager, settings: SchedulerSettings) -> None:
        self._blocks = blocks
        self._preemption = settings.preemption
        self.space = SwapSpace(0 if settings.preemption == "recompute" else settings.num_host_slots)
        self._copies: dict[SequenceKey, HostCopy] = {}  # copies of queued sequences; the one resumed last comes first
        self._lost: list[Sequence] = []  # their copies were not made: the next plan reports them as recomputed
        self._use = SwapUse(num_slots=self.space.num_slots)
        self.cost = CalibratedCost()
        self.block_s = RunningMean(settings.host_block_s or COPY_BLOCK_S)
        self.lost_share = RunningMean(1.0)
        self._expected: dict[SequenceKey, tuple[int, int]] = {}  # (full blocks that others held, all full blocks)

    @property
    def use(self) -> SwapUse:
        self._use.num_used_slots = self.space.num_used
        self._use.num_sequences = len(self._copies)
        return self._use

    # -- a sequence loses its blocks ----------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Plans the copy of a victim that still has its blocks. Returns False if it is to be recomputed instead."""
        if not self.space.num_slots or sequence.prefill_only or sequence.forks or not sequence.num_computed:
            return False
        size = self._blocks.pool.block_size
        num_full = sequence.num_computed // size
        hashes: list[BlockHash | None] = [*sequence.block_hashes(num_full)]
        hashes += [None] * (blocks_for(sequence.num_computed, size) - num_full)
        num_new = self.space.num_new(hashes)
        num_shared = self._blocks.num_shared(sequence)
        self._expected[sequence.key] = (num_shared, num_full)
        preempted = Preempted(sequence.num_computed, num_shared * size, num_new)
        times = estimate(preempted, self.cost.current, self.block_s.value, self.lost_share.value, size)
        yielding = self._yielding(hashes, num_new)
        if yielding is None or not prefers_swap(self._preemption, times, sum(copy.gain_s for copy in yielding)):
            return False
        for copy in yielding:
            self._drop_copy(copy)
            builder.recomputed.append(copy.sequence)
        stored = self.space.store(hashes)
        copy = HostCopy(sequence, stored.slots, sequence.num_computed, sequence.block_state, times.gain_of_copy_s)
        self._copies[sequence.key] = copy
        table = sequence.table.ids
        blocks = tuple(self._blocks.copies.origin(int(table[index])) for index in stored.new)
        builder.leaving[copy] = HostCopies(blocks, tuple(stored.slots[index] for index in stored.new))
        self._use.num_preemptions += 1
        return True

    def _yielding(self, hashes: Seq[BlockHash | None], num_new: int) -> list[HostCopy] | None:
        """Returns the copies to drop for `num_new` free slots, or None if dropping all copies is not enough."""
        missing = num_new - self.space.num_free
        yielding: list[HostCopy] = []
        for copy in self._copies.values():
            if missing <= 0:
                break
            # The slots of a copy that is not made are still written by a step in flight, or by this one.
            if copy.is_made:
                yielding.append(copy)
                missing -= self.space.num_released_by(copy.slots, keep=hashes)
        return yielding if missing <= 0 else None

    def _drop_copy(self, copy: HostCopy) -> None:
        del self._copies[copy.sequence.key]
        self.space.release(copy.slots)
        copy.sequence.state = SequenceState.WAITING
        self._use.num_dropped += 1

    def undo(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """If the victim was to be copied back in the step that is being planned, keeps its copy. Returns whether it
        was."""
        for copy in builder.returning:
            if copy.sequence is sequence:
                del builder.returning[copy]
                self._copies[sequence.key] = copy
                return True
        return False

    # -- a sequence gets blocks again ---------------------------------------------------------------------------------

    def num_tokens(self, sequence: Sequence) -> int:
        """Returns the number of a swapped sequence's tokens whose KV is on the host."""
        return self._copies[sequence.key].num_tokens

    def resume(self, sequence: Sequence, num_next: int, headroom: int, builder: PlanBuilder) -> bool:
        """Gives a swapped sequence blocks, with room for `num_next` more tokens, and plans the copy back. Returns False
        if there are too few blocks, or its copy out has not ended."""
        copy = self._copies[sequence.key]
        if not copy.is_made:
            return False
        if not self._blocks.readmit(sequence, copy.block_state, copy.num_tokens, copy.num_tokens + num_next, headroom):
            return False
        del self._copies[sequence.key]
        start, stop = sequence.num_published, len(copy.slots)
        builder.returning[copy] = HostCopies(tuple(sequence.table.ids[start:stop].tolist()), copy.slots[start:])
        return True

    def resumed(self, sequence: Sequence) -> None:
        """A preempted sequence has blocks again: records how much of its prefix the cache had kept."""
        expected = self._expected.pop(sequence.key, None)
        if expected is not None and expected[1] > expected[0]:
            num_shared, num_full = expected
            num_gone = num_full - max(num_shared, sequence.num_published)
            self.lost_share.observe(max(0, num_gone) / (num_full - num_shared))

    def drop(self, sequence: Sequence) -> None:
        """A sequence leaves. A copy that a step is bringing back ends with that step."""
        self._expected.pop(sequence.key, None)
        copy = self._copies.pop(sequence.key, None)
        if copy is not None:
            self.space.release(copy.slots)

    # -- steps --------------------------------------------------------------------------------------------------------

    def seal(self, builder: PlanBuilder) -> HostCopyPlan | None:
        """The plan is complete: holds all blocks that its copies read and write."""
        builder.recomputed += [sequence for sequence in self._lost if sequence.state is not SequenceState.FINISHED]
        self._lost.clear()
        if not builder.leaving and not builder.returning:
            return None
        out, back = _joined(builder.leaving.values()), _joined(builder.returning.values())
        held_blocks = tuple(dict.fromkeys((*out.blocks, *back.blocks)))
        self._blocks.pool.hold_or_allocate(held_blocks, BlockState.IN_FLIGHT)
        return HostCopyPlan(out, back, tuple(builder.leaving), tuple(builder.returning), held_blocks)

    def landed(self, plan: StepPlan, forward_s: float, copy_s: float) -> None:
        """The step has ended and its copies are made."""
        swaps = plan.host_copies
        if swaps is not None:
            self._blocks.pool.release(swaps.held_blocks, BlockState.IN_FLIGHT)
            for copy in swaps.returning:
                self.space.release(copy.slots)
            for copy in swaps.leaving:
                copy.is_made = True
            self._use.num_blocks_out += len(swaps.out.blocks)
            self._use.num_blocks_in += len(swaps.back.blocks)
            self._use.copy_s += copy_s
            if copy_s > 0 and swaps.num_blocks:
                self.block_s.observe(copy_s / swaps.num_blocks)
        if self.space.num_slots and self._preemption == "auto":
            self.cost.observe(*work_of(plan.rows), forward_s)

    def failed(self, plan: StepPlan) -> list[Sequence]:
        """The step failed and its copies may not be made. Returns running sequences whose KV is only on the host: the
        caller takes their blocks and queues them as swapped."""
        swaps = plan.host_copies
        if swaps is None:
            return []
        self._blocks.pool.release(swaps.held_blocks, BlockState.IN_FLIGHT)
        for copy in swaps.leaving:
            if self._copies.get(copy.sequence.key) is copy:
                self._drop_copy(copy)
                self._lost.append(copy.sequence)
        back = []
        for copy in swaps.returning:
            if copy.sequence.state is SequenceState.RUNNING:
                self._copies[copy.sequence.key] = copy
                back.append(copy.sequence)
            else:
                self.space.release(copy.slots)
        return back

    def check_integrity(self) -> None:
        """While no step is in flight: every slot belongs to the copies of queued sequences. Raises AssertionError."""
        self.space.check_integrity()
        slots = {slot for copy in self._copies.values() for slot in copy.slots}
        assert len(slots) == self.space.num_used, "slots in use that no copy has"
        for copy in self._copies.values():
            assert copy.sequence.state is SequenceState.ON_HOST and not copy.sequence.table.num_blocks


def _joined(copies: Iterable[HostCopies]) -> HostCopies:
    blocks: list[int] = []
    slots: list[int] = []
    for each in copies:
        blocks += each.blocks
        slots += each.slots
    return HostCopies(tuple(blocks), tuple(slots))
