"""Preemption by swapping: the scheduler's side of the host's swap space. Pure bookkeeping, no tensor.

The rules, which make it safe beside writers from outside (handoffs write one-sidedly into what they are granted):

1. Only what a running sequence has committed is copied out, never a reservation's blocks, nor those of a sequence that
   is here for its prompt alone (a transfer may read them).
2. A step copies out, then in, then computes. So rows of a step may take the blocks that it copies out, at once.
3. Whoever is not in the step may not: from the plan's end until the step has landed, every block that its copies read
   or write is held as `in_flight` besides. Only then may it be evicted, granted or given away.
4. A slot that a step copies in is held until that step has landed, so that no copy out of it can overwrite the slot.
5. A copy belongs to a queued sequence, or to the step that copies it in. Resuming moves it from the one to the other;
   the landing of the step, or the sequence's end, or giving it up frees its slots, once.

A copy is whole: a resumed sequence computes nothing again. On the way back it shares what the prefix cache still has.
Copies yield to those that are resumed before them, the one that is resumed last first.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.batch import SwapCopies
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockState
from kvrelay.kv.swap_space import SwapSpace
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.swap_estimate import COPY_BLOCK_S, Preempted, RunningMean, estimate, prefers_swap
from kvrelay.scheduling.plan import PlanDraft, StepPlan, SwapCopy, SwapPlan, work_of
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_cost import CalibratedCost


@dataclass(slots=True)
class SwapUse:
    """Sums since the start, but for the last three: slots, those in use, and sequences that wait with a copy."""

    num_preemptions: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0
    num_dropped: int = 0
    copy_s: float = 0.0
    num_slots: int = 0
    num_used_slots: int = 0
    num_sequences: int = 0


class Swapper:
    """See the module's text. Without slots, or with `recompute`, it never copies."""

    def __init__(self, blocks: BlockManager, settings: SchedulerSettings) -> None:
        self._blocks = blocks
        self._preemption = settings.preemption
        self.space = SwapSpace(0 if settings.preemption == "recompute" else settings.num_swap_slots)
        self._copies: dict[SequenceKey, SwapCopy] = {}  # of queued sequences; the one that is resumed last first
        self._lost: list[Sequence] = []  # their copies were not made; told with the next plan
        self._use = SwapUse(num_slots=self.space.num_slots)
        self.cost = CalibratedCost()
        self.block_s = RunningMean(settings.swap_block_s or COPY_BLOCK_S)
        self.lost_share = RunningMean(1.0)
        self._expected: dict[SequenceKey, tuple[int, int]] = {}  # blocks that others held, and all full ones, then

    @property
    def use(self) -> SwapUse:
        """What was copied, and what lies on the host."""
        self._use.num_used_slots = self.space.num_used
        self._use.num_sequences = len(self._copies)
        return self._use

    # -- a sequence loses its blocks ----------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Plans the copy of a victim that still has its blocks; False where it is to be computed again instead."""
        if not self.space.num_slots or sequence.prefill_only or not sequence.num_computed:
            return False
        size = self._blocks.pool.block_size
        num_full = sequence.num_computed // size
        hashes: list[BlockHash | None] = [*sequence.block_hashes(num_full)]
        hashes += [None] * (blocks_for(sequence.num_computed, size) - num_full)
        num_new = self.space.num_new(hashes)
        num_shared = self._num_shared(sequence, num_full)
        self._expected[sequence.key] = (num_shared, num_full)
        preempted = Preempted(sequence.num_computed, num_shared * size, num_new)
        times = estimate(preempted, self.cost.current, self.block_s.value, self.lost_share.value, size)
        yielding = self._yielding(hashes, num_new)
        if yielding is None or not prefers_swap(self._preemption, times, sum(copy.gain_s for copy in yielding)):
            return False
        for copy in yielding:
            self._drop_copy(copy)
            draft.recomputed.append(copy.sequence)
        stored = self.space.store(hashes)
        copy = SwapCopy(sequence, stored.slots, sequence.num_computed, sequence.block_state, times.gain_of_copy_s)
        self._copies[sequence.key] = copy
        table = sequence.table.ids
        blocks = tuple(self._blocks.copies.origin(int(table[index])) for index in stored.new)
        draft.leaving[copy] = SwapCopies(blocks, tuple(stored.slots[index] for index in stored.new))
        self._use.num_preemptions += 1
        return True

    def _num_shared(self, sequence: Sequence, num_full: int) -> int:
        """Its first blocks that are cached and held by others, too. Who holds one holds those before it: bisected."""
        pool, table = self._blocks.pool, sequence.table.ids
        low, high = 0, num_full
        while low < high:
            middle = (low + high) // 2
            block = int(table[middle])
            if pool.is_cached(block) and pool.num_holds(block) > 1:
                low = middle + 1
            else:
                high = middle
        return low

    def _yielding(self, hashes: Seq[BlockHash | None], num_new: int) -> list[SwapCopy] | None:
        """The copies to give up for room for `num_new` blocks; None if all of them are not enough."""
        missing = num_new - self.space.num_free
        yielding: list[SwapCopy] = []
        for copy in self._copies.values():
            if missing <= 0:
                break
            if copy.is_made:  # else the step under way, or in the making, writes its slots
                yielding.append(copy)
                missing -= self.space.num_released_by(copy.slots, keep=hashes)
        return yielding if missing <= 0 else None

    def _drop_copy(self, copy: SwapCopy) -> None:
        del self._copies[copy.sequence.key]
        self.space.release(copy.slots)
        copy.sequence.state = SequenceState.WAITING
        self._use.num_dropped += 1

    def undo(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """The victim was to be copied back in this very step, and is not: its copy stays. Whether that was so."""
        for copy in draft.returning:
            if copy.sequence is sequence:
                del draft.returning[copy]
                self._copies[sequence.key] = copy
                return True
        return False

    # -- a sequence gets blocks again ---------------------------------------------------------------------------------

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens of a swapped sequence whose K/V is on the host."""
        return self._copies[sequence.key].num_tokens

    def resume(self, sequence: Sequence, num_next: int, headroom: int, draft: PlanDraft) -> bool:
        """Gives a swapped sequence blocks, room for `num_next` more tokens among them, and plans the copy back."""
        copy = self._copies[sequence.key]
        if not copy.is_made:
            return False
        if not self._blocks.readmit(sequence, copy.block_state, copy.num_tokens, copy.num_tokens + num_next, headroom):
            return False
        del self._copies[sequence.key]
        start, stop = sequence.num_published, len(copy.slots)
        draft.returning[copy] = SwapCopies(tuple(sequence.table.ids[start:stop].tolist()), copy.slots[start:])
        return True

    def resumed(self, sequence: Sequence) -> None:
        """A preempted sequence has blocks again, swapped or not: what of its prefix has the cache kept?"""
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

    def seal(self, draft: PlanDraft) -> SwapPlan | None:
        """The plan is made: from here on nobody else may touch what its copies read and write."""
        draft.recomputed += [sequence for sequence in self._lost if sequence.state is not SequenceState.FINISHED]
        self._lost.clear()
        if not draft.leaving and not draft.returning:
            return None
        out, back = _joined(draft.leaving.values()), _joined(draft.returning.values())
        held_blocks = tuple(dict.fromkeys((*out.blocks, *back.blocks)))
        self._blocks.pool.hold_or_allocate(held_blocks, BlockState.IN_FLIGHT)
        return SwapPlan(out, back, tuple(draft.leaving), tuple(draft.returning), held_blocks)

    def landed(self, plan: StepPlan, forward_s: float, copy_s: float) -> None:
        """The step's copies are made."""
        swaps = plan.swaps
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
        """The step's copies may not be made. Returns the running sequences whose K/V is still on the host alone: they
        are to lose their blocks, and are swapped again."""
        swaps = plan.swaps
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
            assert copy.sequence.state is SequenceState.SWAPPED and not copy.sequence.table.num_blocks


def _joined(copies: Iterable[SwapCopies]) -> SwapCopies:
    blocks: list[int] = []
    slots: list[int] = []
    for each in copies:
        blocks += each.blocks
        slots += each.slots
    return SwapCopies(tuple(blocks), tuple(slots))
