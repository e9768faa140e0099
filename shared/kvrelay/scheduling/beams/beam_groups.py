"""The sequences of beam searches. A search is a group of forks of one sequence, the leader.

A group is in one of three states:

1. PREFIX  the leader alone computes the common prefix of all beams: the prompt, or after a preemption the common start
           of all live beams. It is admitted only if all beams fit, and their capacity is reserved.
2. BEAMS   every live beam is a running sequence that asks for candidates. Beams share blocks of a common prefix; a
           shared block is copied before a beam writes it. The search makes a step when all beams have their candidates.
3. OVER    the search is done, or the group was aborted.

PREFIX becomes BEAMS when the prefix is computed, unless the search ends with it. BEAMS becomes PREFIX when the group is
preempted. The leader has the request's key, represents the group in other modules, and is the first beam. The rest of
the scheduler knows a beam by `Sequence.forks` alone, and calls this module when a sequence enters, is admitted, loses
its blocks or leaves, and when rows of forks are committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable, blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.sequence import Forks, Sequence, SequenceState, TokenBuffer
from kvrelay.step.batch import Candidates


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One beam search and its sequences. `texts`: of the live beams while the leader recomputes their prefix."""

    leader: Sequence
    forks: Forks
    search: BeamSearch
    beams: list[Sequence]
    offered: dict[SequenceKey, Candidates] = field(default_factory=dict)
    texts: list[TokenBuffer] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Returns whether the next step of the search can be made, or a prefix is recomputed."""
        if self.forks.num_candidates:
            return len(self.offered) == len(self.beams)
        return self.leader.num_computed == self.leader.num_tokens

    def take_candidates(self) -> list[Candidates]:
        """Returns the candidates of all beams, which are no longer offered."""
        rows = [self.offered[beam.key] for beam in self.beams]
        self.offered.clear()
        return rows


class BeamGroups:
    """The beam groups of one scheduler. `running`: the scheduler's running sequences, which this changes."""

    def __init__(self, blocks: BlockManager, running: dict[SequenceKey, Sequence]) -> None:
        self._blocks = blocks
        self._running = running
        self._capacity = blocks.capacity
        self._groups: dict[Sequence, BeamGroup] = {}  # key: leader

    def forks_of(self, leader: Sequence) -> list[Sequence]:
        """Returns all sequences of a leader's group."""
        return list(self._groups[leader].beams)

    def enter(self, leader: Sequence) -> None:
        """A sequence joined the scheduler: makes its group if it asks for a beam search."""
        spec = leader.sampling.beams
        if spec is None:
            return
        search = BeamSearch(spec, leader.stop_tokens, leader.max_length - leader.num_prompt)
        leader.forks = Forks(leader, 1 if leader.prefill_only else spec.width, 0, search.num_candidates)
        self._groups[leader] = group = BeamGroup(leader, leader.forks, search, [leader])
        group.forks.num_blocks = self._num_fork_blocks(group)

    def admitted(self, leader: Sequence) -> None:
        """The leader runs and computes the prefix: reserves capacity for the others."""
        if leader.num_slots > 1 or leader.num_fork_blocks:
            self._capacity.reserve(self._groups[leader], leader.num_slots - 1, leader.num_fork_blocks)

    def left(self, leader: Sequence) -> None:
        """The group has ended."""
        self._capacity.end(self._groups.pop(leader))

    def collapse(self, leader: Sequence) -> None:
        """All beams have lost their blocks: the leader computes the prefix again, and the others are dropped."""
        group = self._groups[leader]
        self._capacity.end(group)
        if group.forks.are_parted:
            group.offered.clear()
            group.texts = [beam.tokens for beam in group.beams]
            group.beams, group.forks.are_parted = [leader], False
            leader.tokens = TokenBuffer(group.texts[0].view(0, _num_common(group.texts)))
            group.forks.num_candidates = 0
            group.forks.num_blocks = self._num_fork_blocks(group)

    # -- results ------------------------------------------------------------------------------------------------------

    @staticmethod
    def check(sequence: Sequence, candidates: Candidates | None) -> None:
        """Raises ValueError unless a beam search, and no other sequence, brings candidates that follow its prompt."""
        if (sequence.forks is None) != (candidates is None):
            raise ValueError(f"sequence {sequence.key}: a beam search needs candidates, no other sequence has any")
        if candidates is not None:
            BeamSearch.check(candidates)

    def offer(self, fork: Sequence, candidates: Candidates) -> None:
        """A step has found the candidates of a beam."""
        assert fork.forks is not None
        self._groups[fork.forks.leader].offered[fork.key] = candidates

    def advance(self, leader: Sequence) -> SequenceOutput | None:
        """Makes a step of a search if it has the candidates of all its beams. Returns its output if that ends it, or if
        the candidates are those that follow the prompt."""
        group = self._groups[leader]
        if not group.is_ready:
            return None
        is_prefix, first = not group.forks.are_parted, None
        if group.forks.num_candidates:
            rows = group.take_candidates()
            first = rows[0] if is_prefix else None
            group.search.advance(rows)
        texts = group.search.results() if group.search.is_done else []
        if not texts and not leader.prefill_only:
            self._branch(group)
        if not texts and first is None:
            return None
        finish = texts[0].finish if texts else None
        return SequenceOutput(leader, 0, finish=finish, prefilled=is_prefix, candidates=first, texts=texts)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _branch(self, group: BeamGroup) -> None:
        """Makes the sequences of a group the live beams of its search."""
        if group.forks.are_parted:
            self._follow(group)
            self._running.update((beam.key, beam) for beam in group.beams)
            return
        leader = group.leader
        self._capacity.end(group)
        self._blocks.change_block_state(leader, BlockState.RUNNING)
        unused = leader.table.truncate(blocks_for(leader.num_computed, leader.table.block_size))
        self._blocks.pool.release(unused, BlockState.RUNNING)
        group.forks.num_blocks, group.forks.are_parted = 0, True
        if texts := group.texts:
            group.texts = []
            group.forks.num_candidates = group.search.num_candidates
            position = leader.num_computed
            self._share(group, [0] * len(texts))
            for beam, text in zip(group.beams, texts, strict=True):
                beam.tokens, beam.num_computed = text, position
        else:
            self._follow(group)
        self._place_behind_leader(group)

    @staticmethod
    def _num_fork_blocks(group: BeamGroup) -> int:
        """Returns the number of blocks for the next tokens of all beams beside those of the prefix."""
        leader = group.leader
        if leader.prefill_only:
            return 0
        size, prefix = leader.table.block_size, leader.num_tokens
        num_each = blocks_for(leader.num_prompt + group.search.num_tokens + 1, size) - prefix // size
        return group.forks.num_slots * num_each - (blocks_for(prefix, size) - prefix // size)

    def _follow(self, group: BeamGroup) -> None:
        """Each live beam continues its parent."""
        position = group.leader.num_tokens
        self._share(group, group.search.parents.tolist())
        for beam, token in zip(group.beams, group.search.tokens.tolist(), strict=True):
            beam.tokens.append(token)
            beam.num_computed = position

    def _share(self, group: BeamGroup, parents: Seq[int]) -> None:
        """Beam i gets the tokens and blocks of beam parents[i]: the first child takes them over, the others take
        copies. Beams without a child release their blocks, and those beyond the live ones end."""
        before, taken, pool = group.beams, set[int](), self._blocks.pool
        shares: list[tuple[TokenBuffer, BlockTable]] = []
        for parent in parents:
            tokens, table = before[parent].tokens, before[parent].table
            if parent in taken:
                pool.hold(table.ids, BlockState.RUNNING)
                tokens, table = tokens.copy(), BlockTable(table.block_size, table.ids)
            taken.add(parent)
            shares.append((tokens, table))
        for index, beam in enumerate(before):
            if index not in taken:
                pool.release(beam.table.ids, BlockState.RUNNING)
        group.beams = [
            before[index] if index < len(before) else self._fork(group.leader, index) for index in range(len(parents))
        ]
        for beam, (tokens, table) in zip(group.beams, shares, strict=True):
            beam.tokens, beam.table = tokens, table
        for beam in before[len(parents) :]:
            beam.state = SequenceState.FINISHED
            del self._running[beam.key]

    @staticmethod
    def _fork(leader: Sequence, index: int) -> Sequence:
        return replace(leader, key=(*leader.key[:2], index), hashes=[])

    def _place_behind_leader(self, group: BeamGroup) -> None:
        """Puts the beams next to the leader in the order of running sequences: they are as old as the leader, and the
        youngest sequence is preempted first."""
        later = list(self._running)
        del later[: later.index(group.leader.key) + 1]
        moved = [(key, self._running.pop(key)) for key in later]
        self._running.update((beam.key, beam) for beam in group.beams)
        self._running.update(moved)


def _num_common(texts: Seq[TokenBuffer]) -> int:
    """Returns the number of tokens in common at the start, without the last token, which each beam computes. All texts
    have the same length."""
    rows = np.stack([text.view(0, text.num_tokens - 1) for text in texts])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else len(differs)
