"""The sequences of one beam search: a group that is admitted, preempted and resumed as one.

States of a group:

1. PREFIX   one sequence, the leader, computes what all beams have in common: the prompt; after a preemption the common
           start of all live beams. It is admitted only where there is room for all beams.
2. BEAMS  every live beam is a running sequence. They share blocks down to where they part: the prefix's full blocks are
           held once, by the group; those behind by each beam; a block that is written and shared is copied first.
           A step of the search is made when all of them have their candidates; then those that nobody follows let go
           of their blocks.
3. OVER    the search is done, or the group was aborted.

PREFIX > BEAMS when the prefix is computed (and the search has not ended with it); BEAMS > PREFIX when blocks run out.

The leader has the request's key, stands for all of them towards the outside, and is the first beam while they are
split into beams.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.engine.batch import BeamCandidates
from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable, blocks_for
from kvrelay.protocol.sampling import BeamResult, BeamSpec
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.sequence import Sequence, SequenceState, TokenBuffer


class BeamGroup:
    """See the module's text. Its sequences hold blocks by `blocks`, who runs is the scheduler's business."""

    def __init__(self, leader: Sequence, spec: BeamSpec, search: BeamSearch) -> None:
        self.leader = leader
        self.search = search
        self.members = [leader]
        self.has_beams = False
        self._width = spec.width
        self._offered: dict[SequenceKey, BeamCandidates] = {}
        self._prefix_blocks: list[int] = []
        self._texts: list[TokenBuffer] = []  # of the live beams, while they are not split into beams

    @property
    def wants_candidates(self) -> bool:
        """Whether its sequences' last tokens are to be followed; a prefix that is computed again gives none."""
        return self.has_beams or self.search.num_tokens == 0

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam is to give."""
        return self.search.num_candidates

    @property
    def num_slots(self) -> int:
        """Running sequences that it will be. On a prefill worker it never forks."""
        return 1 if self.leader.prefill_only else self._width

    def num_reserved_blocks(self) -> int:
        """Blocks that its prefix leaves to the beams' next tokens."""
        if self.has_beams or self.leader.prefill_only:
            return 0
        size, prefix = self.leader.table.block_size, self.leader.num_tokens
        num_each = blocks_for(self.leader.num_prompt + self.search.num_tokens + 1, size) - prefix // size
        return self._width * num_each - (blocks_for(prefix, size) - prefix // size)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is computing any of them."""
        return any(member.num_planned for member in self.members)

    @property
    def is_ready(self) -> bool:
        """Whether all that the next step of the search needs is there."""
        if self.wants_candidates:
            return len(self._offered) == len(self.members)
        return self.leader.num_computed == self.leader.num_tokens

    def offer(self, sequence: Sequence, candidates: BeamCandidates) -> None:
        """A member's candidates."""
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
        """Makes the members the search's live beams. Returns those that are no member any more."""
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
        """The members lost their blocks, all of them: the leader is the prefix again, the others are no more."""
        if not self.has_beams:
            return
        self._offered.clear()
        self._texts = [member.tokens for member in self.members]
        prefix = self._texts[0].view(0, _num_common(self._texts))
        self.members = [self.leader]
        self.leader.tokens = TokenBuffer(prefix)
        self.has_beams = False

    def free(self, blocks: BlockManager) -> None:
        """Lets go of all its blocks."""
        for member in self.members:
            blocks.free(member)
        blocks.pool.release(self._prefix_blocks, BlockState.RUNNING)
        self._prefix_blocks = []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plant(self, blocks: BlockManager) -> None:
        """The prefix is computed: its full blocks become the group's; room beyond it is given back."""
        leader = self.leader
        size = leader.table.block_size
        blocks.change_block_state(leader, BlockState.RUNNING)
        blocks.pool.release(leader.table.truncate(blocks_for(leader.num_computed, size)), BlockState.RUNNING)
        leader.num_borrowed = leader.num_computed // size
        self._prefix_blocks = leader.table.ids[: leader.num_borrowed].tolist()
        self.has_beams = True

    def _follow(self, blocks: BlockManager) -> list[Sequence]:
        """Each live beam goes on from its parent. Who has no child lets go of its blocks."""
        position = self.members[0].num_tokens
        left = self._share(self.search.parents.tolist(), blocks)
        for member, token in zip(self.members, self.search.tokens.tolist(), strict=True):
            member.tokens.append(token)
            member.num_computed = position
        return left

    def _share(self, parents: Seq[int], blocks: BlockManager) -> list[Sequence]:
        """Member i gets what member parents[i] has; the first of several takes it over, the others take copies."""
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
    """What a step of a search came to. `first`: the prompt's candidates. `results` are there when it is done."""

    first: BeamCandidates | None
    results: list[BeamResult]


class BeamGroups:
    """The groups of one scheduler, which keeps `running`."""

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
        """Places among the running sequences that prefixes keep for their beams."""
        return sum(group.num_slots - 1 for group in self._prefixes.values())

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that prefixes keep for their beams."""
        return sum(group.num_reserved_blocks() for group in self._prefixes.values())

    def enter(self, leader: Sequence) -> None:
        """A sequence joins the scheduler: a beam search starts, if it asks for one."""
        spec = leader.sampling.beams
        if spec is not None:
            leader.needs_commit_first = True  # who follows whom is known when all candidates are
            search = BeamSearch(spec, leader.stop_tokens, leader.max_length - leader.num_prompt)
            leader.beams = BeamGroup(leader, spec, search)

    def admitted(self, group: BeamGroup) -> None:
        """Its prefix runs."""
        self._prefixes[group.leader.key] = group

    def advance(self, group: BeamGroup) -> BeamStep:
        """Everything is there for a step of the search, or for its beams to go on after a preemption."""
        first = group.advance()
        if group.search.is_done:
            return BeamStep(first, group.search.results())
        if not group.leader.prefill_only:
            self._branch(group)
        return BeamStep(first, [])

    def preempt(self, group: BeamGroup, drop_row: Callable[[Sequence], None]) -> None:
        """All of them lose their blocks; what is left is the leader, which does not run."""
        for member in group.members:
            drop_row(member)
        self.leave(group)
        group.collapse()

    def leave(self, group: BeamGroup) -> None:
        """Nobody of it runs any more, or holds anything."""
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
        """The beams got their blocks when the leader did: that is their age when somebody has to go."""
        later = list(self._running)
        del later[: later.index(group.leader.key) + 1]
        moved = [(key, self._running.pop(key)) for key in later]
        self._running.update((member.key, member) for member in group.members)
        self._running.update(moved)


def _num_common(texts: Seq[TokenBuffer]) -> int:
    """Tokens that all texts, which are of one length, start with; without their last ones, which each beam computes."""
    rows = np.stack([text.view(0, text.num_tokens - 1) for text in texts])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else len(differs)
