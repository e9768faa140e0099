"""The sequences of one beam search. They are admitted, preempted and resumed together.

A group is in one of three states:

1. PREFIX  one sequence, the leader, computes the common prefix of all beams: the prompt, or after a preemption the
           common start of all live beams. It is admitted only if all beams fit.
2. BEAMS   every live beam is a running sequence. Beams share their common blocks: the group holds the full blocks of
           the prefix once, and each beam holds the blocks behind them. A shared block is copied before a beam writes
           it. The search makes a step when all beams have their candidates; then beams that no beam follows release
           their blocks.
3. OVER    the search is done, or the group was aborted.

PREFIX becomes BEAMS when the prefix is computed, unless the search ends with it. BEAMS becomes PREFIX when the group is
preempted.

The leader has the request's key, represents the group outside the scheduler, and is the first of the beams.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable, blocks_for
from kvrelay.protocol.sampling import BeamResult, BeamSpec
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.sequence import Sequence, SequenceState, TokenBuffer
from kvrelay.step.batch import BeamCandidates


class BeamGroup:
    """One beam search and its sequences. The caller keeps the list of running sequences."""

    def __init__(self, leader: Sequence, spec: BeamSpec, search: BeamSearch) -> None:
        self.leader = leader
        self.search = search
        self.members = [leader]
        self.has_beams = False
        self._width = spec.width
        self._offered: dict[SequenceKey, BeamCandidates] = {}
        self._prefix_blocks: list[int] = []
        self._texts: list[TokenBuffer] = []  # texts of the live beams while the leader recomputes their prefix

    @property
    def wants_candidates(self) -> bool:
        """Returns whether the last tokens of its sequences need candidates. Recomputing a prefix needs none."""
        return self.has_beams or self.search.num_tokens == 0

    @property
    def num_candidates(self) -> int:
        """Number of candidates for each beam."""
        return self.search.num_candidates

    @property
    def num_slots(self) -> int:
        """Number of running sequences that it will become; 1 on a prefill worker, which has no beams."""
        return 1 if self.leader.prefill_only else self._width

    def num_reserved_blocks(self) -> int:
        """Returns the number of blocks that are reserved for the next tokens of the beams while it computes the
        prefix."""
        if self.has_beams or self.leader.prefill_only:
            return 0
        size, prefix = self.leader.table.block_size, self.leader.num_tokens
        num_each = blocks_for(self.leader.num_prompt + self.search.num_tokens + 1, size) - prefix // size
        return self._width * num_each - (blocks_for(prefix, size) - prefix // size)

    @property
    def is_in_flight(self) -> bool:
        """Returns whether one of its sequences is in a step."""
        return any(member.num_planned for member in self.members)

    @property
    def is_ready(self) -> bool:
        """Returns whether the next step of the search can be made."""
        if self.wants_candidates:
            return len(self._offered) == len(self.members)
        return self.leader.num_computed == self.leader.num_tokens

    def offer(self, sequence: Sequence, candidates: BeamCandidates) -> None:
        """Records the candidates of one of its sequences."""
        self._offered[sequence.key] = candidates

    def advance(self) -> BeamCandidates | None:
        """Makes a step of the search and returns the first row's candidates; None for a prefix that was recomputed."""
        if not self.wants_candidates:
            return None
        rows = [self._offered[member.key] for member in self.members]
        self._offered.clear()
        self.search.advance(rows)
        return rows[0]

    def branch(self, blocks: BlockManager) -> list[Sequence]:
        """Makes its sequences the live beams of the search. Returns sequences that are no longer part of it."""
        if self.has_beams:
            return self._follow(blocks)
        self._plant(blocks)
        if self.search.num_tokens == 1 and not self._texts:
            return self._follow(blocks)
        texts, self._texts = self._texts, []
        position = self.leader.num_computed
        self._share([0] * len(texts), blocks)
        for member, text in zip(self.members, texts, strict=True):
            member.tokens, member.num_computed = text, position
        return []

    def collapse(self) -> None:
        """Its sequences have lost their blocks: the leader computes the prefix again, and the others are dropped."""
        if not self.has_beams:
            return
        self._offered.clear()
        self._texts = [member.tokens for member in self.members]
        prefix = self._texts[0].view(0, _num_common(self._texts))
        self.members = [self.leader]
        self.leader.tokens = TokenBuffer(prefix)
        self.has_beams = False

    def free(self, blocks: BlockManager) -> None:
        """Releases all its blocks."""
        for member in self.members:
            blocks.free(member)
        blocks.pool.release(self._prefix_blocks, BlockState.RUNNING)
        self._prefix_blocks = []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plant(self, blocks: BlockManager) -> None:
        """The prefix is computed: the group takes over the holds on its full blocks, and releases unused blocks."""
        leader = self.leader
        size = leader.table.block_size
        blocks.change_block_state(leader, BlockState.RUNNING)
        blocks.pool.release(leader.table.truncate(blocks_for(leader.num_computed, size)), BlockState.RUNNING)
        leader.num_borrowed = leader.num_computed // size
        self._prefix_blocks = leader.table.ids[: leader.num_borrowed].tolist()
        self.has_beams = True

    def _follow(self, blocks: BlockManager) -> list[Sequence]:
        """Each live beam continues its parent. Sequences without a child release their blocks. Returns those that
        left."""
        position = self.members[0].num_tokens
        left = self._share(self.search.parents.tolist(), blocks)
        for member, token in zip(self.members, self.search.tokens.tolist(), strict=True):
            member.tokens.append(token)
            member.num_computed = position
        return left

    def _share(self, parents: Seq[int], blocks: BlockManager) -> list[Sequence]:
        """Member i gets the tokens and blocks of member parents[i]: the first child takes them over, the others take
        copies."""
        before, taken = self.members, set[int]()
        shares: list[tuple[TokenBuffer, BlockTable]] = []
        for parent in parents:
            tokens, table = before[parent].tokens, before[parent].table
            if parent in taken:
                blocks.pool.hold(table.ids[self.leader.num_borrowed :], BlockState.RUNNING)
                tokens, table = tokens.copy(), BlockTable(table.block_size, table.ids)
            taken.add(parent)
            shares.append((tokens, table))
        for index, member in enumerate(before):
            if index not in taken:
                blocks.pool.release(member.table.ids[member.num_borrowed :], BlockState.RUNNING)
        self.members = [
            before[index] if index < len(before) else self._new_member(index) for index in range(len(parents))
        ]
        for member, (tokens, table) in zip(self.members, shares, strict=True):
            member.tokens, member.table = tokens, table
        left = before[len(parents) :]
        for member in left:
            member.state = SequenceState.FINISHED
        return left

    def _new_member(self, index: int) -> Sequence:
        leader = self.leader
        member = replace(leader, key=(*leader.key[:2], index), hashes=[])
        member.state, member.block_state = SequenceState.RUNNING, BlockState.RUNNING
        return member


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The outcome of a step of a search. `first`: the candidates that follow the prompt. `results`: not empty when the
    search is done."""

    first: BeamCandidates | None
    results: list[BeamResult]


class BeamGroups:
    """The beam groups of one scheduler. `running`: the scheduler's running sequences, which this changes."""

    def __init__(
        self,
        blocks: BlockManager,
        running: dict[SequenceKey, Sequence],
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._prefixes: dict[SequenceKey, BeamGroup] = {}  # those that run

    @property
    def num_reserved_slots(self) -> int:
        """Number of running sequences that are reserved for the beams of groups that compute their prefix."""
        return sum(group.num_slots - 1 for group in self._prefixes.values())

    @property
    def num_reserved_blocks(self) -> int:
        """Number of blocks that are reserved for the beams of groups that compute their prefix."""
        return sum(group.num_reserved_blocks() for group in self._prefixes.values())

    def enter(self, leader: Sequence) -> None:
        """A sequence joined the scheduler: makes its group if it asks for a beam search."""
        spec = leader.sampling.beams
        if spec is not None:
            leader.needs_commit_first = True  # all candidates must be known before the next step can be planned
            search = BeamSearch(spec, leader.stop_tokens, leader.max_length - leader.num_prompt)
            leader.beams = BeamGroup(leader, spec, search)

    def admitted(self, group: BeamGroup) -> None:
        """The leader of the group runs and computes the prefix."""
        self._prefixes[group.leader.key] = group

    def advance(self, group: BeamGroup) -> BeamStep:
        """Makes a step of the search, or splits the group into beams again after a preemption. The group is ready."""
        first = group.advance()
        if group.search.is_done:
            return BeamStep(first, group.search.results())
        if not group.leader.prefill_only:
            self._branch(group)
        return BeamStep(first, [])

    def preempt(self, group: BeamGroup, drop_row: Callable[[Sequence], None]) -> None:
        """All its sequences lose their blocks. The leader remains and does not run."""
        for member in group.members:
            drop_row(member)
        self.leave(group)
        group.collapse()

    def leave(self, group: BeamGroup) -> None:
        """Releases all blocks of the group and removes its sequences from the running ones."""
        group.free(self._blocks)
        for member in group.members:
            del self._running[member.key]
            member.state = SequenceState.FINISHED
        self._prefixes.pop(group.leader.key, None)

    def _branch(self, group: BeamGroup) -> None:
        is_first = self._prefixes.pop(group.leader.key, None) is not None
        for member in group.branch(self._blocks):
            del self._running[member.key]
        if is_first:
            self._place_behind_leader(group)
        else:
            self._running.update((member.key, member) for member in group.members)

    def _place_behind_leader(self, group: BeamGroup) -> None:
        """Puts the beams next to the leader in the order of running sequences: they are as old as the leader, and the
        youngest sequence is preempted first."""
        later = list(self._running)
        del later[: later.index(group.leader.key) + 1]
        moved = [(key, self._running.pop(key)) for key in later]
        self._running.update((member.key, member) for member in group.members)
        self._running.update(moved)


def _num_common(texts: Seq[TokenBuffer]) -> int:
    """Returns the number of tokens in common at the start, without the last token, which each beam computes. All texts
    have the same length."""
    rows = np.stack([text.view(0, text.num_tokens - 1) for text in texts])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else len(differs)
