"""Commits rows of beams: a search makes a step once the candidates of all its beams are there."""

from __future__ import annotations

from kvrelay.scheduling.beams.beam_groups import BeamGroup
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import PlannedRow, SequenceOutput
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import BeamCandidates, RowResult


class BeamCommit:
    """Commits to the beam searches of one scheduler."""

    def __init__(self, lifecycle: SequenceLifecycle) -> None:
        self._lifecycle = lifecycle
        self._groups = lifecycle.beams
        self._changed: dict[BeamGroup, None] = {}

    def commit_row(self, row: PlannedRow, given: RowResult) -> None:
        """A step has computed a row of a beam. `advance` follows when all rows of the step are committed."""
        sequence = row.sequence
        self._lifecycle.row_ended(row)  # beams end only in `advance`, so the sequence is always there
        sequence.num_computed += row.num_tokens
        group = self._groups.of(sequence)
        self._changed[group] = None
        if given.candidates is not None:
            group.offered[sequence.key] = given.candidates

    def advance(self) -> list[SequenceOutput]:
        """Makes a step of each search that has all its candidates."""
        changed, self._changed = self._changed, {}
        return [output for group in changed if (output := self._advance(group)) is not None]

    @staticmethod
    def check(sequence: Sequence, candidates: BeamCandidates | None) -> None:
        """Raises ValueError unless a beam search, and no other sequence, brings candidates that follow its prompt."""
        if (sequence.sampling.beams is None) != (candidates is None):
            raise ValueError(f"sequence {sequence.key}: a beam search needs candidates, no other sequence has any")
        if candidates is not None:
            BeamSearch.check(candidates)

    def adopt(self, leader: Sequence, candidates: BeamCandidates) -> SequenceOutput | None:
        """A handoff of a beam search runs. Returns its output if the candidates end it."""
        group = self._groups.of(leader)
        group.offered[leader.key] = candidates
        output = self._advance(group)
        return output if output is not None and output.finish is not None else None

    def _advance(self, group: BeamGroup) -> SequenceOutput | None:
        lifecycle, leader = self._lifecycle, group.leader
        if leader.abort_requested:
            lifecycle.leave(leader)
            return None
        is_prefix, first = not group.has_beams, None
        if is_prefix:
            lifecycle.publish(leader)  # beams publish nothing: a beam that no other follows is not worth caching
        if not group.is_ready:
            return None
        if group.forks.num_candidates:
            rows = group.take_candidates()
            first = rows[0] if is_prefix else None
            group.search.advance(rows)
        results = group.search.results() if group.search.is_done else []
        if results:
            lifecycle.leave(leader)
        elif not leader.prefill_only:
            self._groups.branch(group)
        if not results and first is None:
            return None
        finish = results[0].finish if results else None
        return SequenceOutput(leader, 0, finish=finish, prefilled=is_prefix, candidates=first, beams=results)
