"""Admission: gives the next waiting sequence its blocks, or says why it waits.

One queue holds local prompts, preempted sequences and pending handoffs. The first sequence that does not fit ends the
admission of a step: no sequence is admitted before one that is ahead of it in the queue.

A slot is a place among the running sequences. The followers of a sequence are the waiting samples of its request: slots
and blocks are reserved for them when it is admitted, so they are not asked again whether they fit. A group that was
preempted together is admitted together.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.chunk_sizes import Chunks
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import NeedsCommit, PlanBuilder, PlannedRow
from kvrelay.scheduling.queue.prefill_delay import PrefillDelayer
from kvrelay.scheduling.sequence import Sequence, SequenceState


class SequenceAdmission:
    """Admits sequences of one scheduler.

    `decodes_beside_prompts`: whether a sequence that resumes decodes in the step that admits it.
    """

    def __init__(self, lifecycle: SequenceLifecycle, chunks: Chunks, *, decodes_beside_prompts: bool) -> None:
        self.prefill_gate: PrefillDelayer | None = None
        """Asked in each pass with a prompt to admit."""
        self._lifecycle = lifecycle
        self._limits = lifecycle.limits
        self._blocks = lifecycle.blocks
        self._waiting = lifecycle.waiting
        self._remote = lifecycle.remote
        self._offload = lifecycle.offload
        self._groups = lifecycle.sample_groups
        self._chunks = chunks
        self._decodes_beside_prompts = decodes_beside_prompts
        self._refused: tuple[SequenceKey, int, int] | None = None  # sequence, available blocks and headroom then

    def admit_next(self, builder: PlanBuilder, *, beyond_budget: bool = False, handoffs_only: bool = False) -> str:
        """Admits the next sequence of the queue and returns "", or returns why it is not admitted.

        `beyond_budget`: admit it even if no token budget is left. `handoffs_only`: stop at a local prompt.
        """
        if builder.is_short_of_blocks:
            return "decodes were preempted in this step"
        if not self._waiting:
            return "queue empty"
        num_slots = self._lifecycle.num_slots
        if num_slots >= self._limits.max_running and not self._waiting.has_reserved:
            return "max_running reached"
        sequence = self._waiting.head()
        if sequence is None:
            return "its prefix is being computed or sent"
        if handoffs_only and sequence.remote is None:
            return "a local prompt is next"
        has_reserved_capacity = self._groups.has_reserved_capacity(sequence) or self._remote.has_capacity(sequence)
        followers = self._groups.followers_of(sequence)
        if not has_reserved_capacity:
            num_wanted = sequence.num_slots + len(followers) + self._remote.num_to_come(sequence)
            if reason := self._why_not_now(sequence, num_slots, num_wanted, builder):
                return reason
        if sequence.remote is not None:
            if builder.leaving:
                # Its sender would write at once into blocks that this step copies to the host.
                return "blocks of preempted sequences are being copied to the host"
            return "" if self._remote.reserve(sequence, self._handoff_headroom(sequence)) else "no blocks"
        if not has_reserved_capacity and len(group := self._groups.lost_with(sequence)) > 1 and sequence in group:
            if self._admit_group(group, builder):
                return ""
            if self._lifecycle.running or self._remote.receiving:
                return "no room for the whole group"
            if builder.ahead:
                raise NeedsCommit
        if sequence.state is SequenceState.ON_HOST:
            return self._admit_from_host(sequence, builder, beyond_budget)
        return self._admit_prompt(sequence, followers, builder, beyond_budget)

    @property
    def may_admit_prompt(self) -> bool:
        """Returns whether the prefill gate will be asked, unless blocks are missing or decodes are preempted first."""
        head = self._waiting.head()
        if head is None or head.remote is not None or head.state is SequenceState.ON_HOST:
            return False
        return self._lifecycle.num_slots < self._limits.max_running

    def _why_not_now(self, sequence: Sequence, num_slots: int, num_wanted: int, builder: PlanBuilder) -> str:
        """Returns why a sequence waits whatever blocks are free: too few places among the running sequences for the
        `num_wanted` that it and its group become, or the prefill gate."""
        max_running = self._limits.max_running
        if num_slots + num_wanted > max_running:
            is_full = num_slots >= max_running
            return "max_running reached" if is_full else "max_running leaves no room for all its samples or forks"
        if self.prefill_gate is None or sequence.state is SequenceState.ON_HOST or sequence.remote is not None:
            return ""
        reason = self.prefill_gate.ask(len(self._lifecycle.running))
        builder.delayed = builder.delayed or bool(reason)
        return reason

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _admit_prompt(
        self, sequence: Sequence, followers: Mapping[Sequence, int], builder: PlanBuilder, beyond_budget: bool
    ) -> str:
        position = self._blocks.num_cached_tokens(sequence)
        num_tokens = self._chunks.size(self._blocks.first_stop(sequence, position) - position, position, builder)
        if not num_tokens and not beyond_budget:
            return "budget spent"
        if not self._give_blocks(sequence, position + num_tokens, followers):
            return "no blocks for the whole group" if followers else "no blocks"
        self._admitted(sequence, builder, num_tokens)
        self._reserve(followers)
        return ""

    def _give_blocks(self, sequence: Sequence, num_next: int, followers: Mapping[Sequence, int]) -> bool:
        """Gives a sequence the blocks of its first chunk.

        Free and evictable blocks must hold the part of the prompt that is not cached, besides what is reserved. After a
        refusal the cache is not asked again until more blocks are available.
        """
        available = self._blocks.num_available
        headroom = 0 if self._groups.has_reserved_capacity(sequence) else self._lifecycle.num_headroom_blocks
        headroom += sum(followers.values())
        headroom += sequence.num_fork_blocks
        if self._refused is not None:
            key, available_then, headroom_then = self._refused
            if key == sequence.key and available <= available_then and headroom >= headroom_then:
                return False
        admitted = self._blocks.admit(sequence, BlockState.COMPUTING, num_next=num_next, headroom=headroom)
        self._refused = None if admitted else (sequence.key, available, headroom)
        return admitted

    def _admitted(self, sequence: Sequence, builder: PlanBuilder, num_tokens: int) -> None:
        """A sequence has its blocks: it runs, with a chunk of `num_tokens` or fewer. It may have to compute a tail for
        others that was cached when the chunk was chosen, because its own blocks evicted that."""
        self._lifecycle.admitted(sequence)
        builder.admitted.append(sequence)
        if num_tokens:
            builder.add_chunk(sequence, min(num_tokens, self._blocks.num_before_stop(sequence)))

    def _reserve(self, num_blocks_of: Mapping[Sequence, int]) -> None:
        for sequence, num_blocks in num_blocks_of.items():
            self._groups.reserve(sequence, num_blocks)
            self._waiting.reserve(sequence)

    # -- handoffs -----------------------------------------------------------------------------------------------------

    def _handoff_headroom(self, sequence: Sequence) -> int:
        """Blocks that must stay available besides a handoff's own: a sequence whose KV arrives cannot be preempted."""
        lifecycle = self._lifecycle
        headroom = 0 if self._remote.has_capacity(sequence) else lifecycle.num_reserved_blocks
        headroom += sequence.num_fork_blocks
        if lifecycle.running or self._remote.receiving:
            # At least a block for each running sequence: else one that grows would preempt another at once.
            expected = lifecycle.new_token_ratio.headroom(lifecycle.running.values(), self._blocks)
            headroom += max(len(lifecycle.running) + 1, expected)
        return headroom

    # -- preempted sequences ------------------------------------------------------------------------------------------

    def _admit_from_host(self, sequence: Sequence, builder: PlanBuilder, beyond_budget: bool) -> str:
        """Resumes a sequence whose KV is copied back from the host.

        Copies of two steps must not overlap, so this raises NeedsCommit if a step is in flight, and there is room. If
        there is none, steps can still be planned ahead.
        """
        position, headroom = self._offload.num_tokens(sequence), self._lifecycle.num_headroom_blocks
        if builder.ahead:
            if self._blocks.num_missing(sequence, position) + headroom > self._blocks.num_available:
                return "no blocks"
            raise NeedsCommit
        num_remaining = sequence.num_tokens - position
        decodes = num_remaining == 1 and sequence.num_output > 0
        num_tokens = (
            min(1, max(0, builder.budget_left)) if decodes else self._chunks.size(num_remaining, position, builder)
        )
        if not num_tokens and not beyond_budget:
            return "budget spent"
        if not self._offload.resume(sequence, num_tokens, headroom, builder):
            return "no blocks"
        self._admitted(sequence, builder, 0 if decodes else num_tokens)
        if decodes and num_tokens and self._decodes_beside_prompts:
            builder.add_decode(PlannedRow(sequence, position, 1, False, True))
        return ""

    def _admit_group(self, group: Seq[Sequence], builder: PlanBuilder) -> bool:
        """Resumes all samples of a preempted group, whatever the budget, or none. Returns whether it did.

        Samples that lack blocks which the first one recomputes wait for them, with reserved capacity. Raises
        NeedsCommit if there is room and a step is in flight, as samples may be copied back.
        """
        back = self._groups.plan_return(group)
        num_blocks = back.num_blocks + self._lifecycle.num_headroom_blocks
        num_available = self._blocks.num_available
        if self._lifecycle.num_slots + len(group) > self._limits.max_running or num_blocks > num_available:
            return False
        # Blocks that these samples find in the cache count as available until the samples hold them.
        if num_blocks + self._groups.num_evictable(back.given) > num_available:
            return False
        if builder.ahead:
            raise NeedsCommit
        for index, sequence in enumerate(back.given):
            if not self._give_all_blocks(sequence, builder, sum(back.reserved.values())):
                for before in reversed(back.given[:index]):
                    self._offload.undo(before, builder)
                    self._blocks.free(before)
                return False
        for sequence in back.given:
            if sequence.is_decoding:
                self._admitted(sequence, builder, 0)
                if self._decodes_beside_prompts and builder.budget_left > 0:
                    builder.add_decode(PlannedRow(sequence, sequence.num_computed, 1, False, True))
            else:
                num_tokens = self._chunks.size(sequence.num_remaining, sequence.next_position, builder)
                self._admitted(sequence, builder, num_tokens)
        self._reserve(back.reserved)
        return True

    def _give_all_blocks(self, sequence: Sequence, builder: PlanBuilder, num_reserved: int) -> bool:
        """Gives a preempted sequence blocks for all its tokens. `num_reserved` blocks must stay available besides."""
        headroom = self._lifecycle.num_headroom_blocks + num_reserved
        if sequence.state is SequenceState.ON_HOST:
            num_next = sequence.num_tokens - self._offload.num_tokens(sequence)
            return self._offload.resume(sequence, num_next, headroom, builder)
        return self._blocks.admit(sequence, BlockState.COMPUTING, num_next=sequence.num_tokens, headroom=headroom)
