"""Tokens that grammars force: which sequences have any, how many a step computes, and when a step waits for them.

A step that is planned behind one that samples a constrained sequence expects one token of that. If a grammar forces
more, the row behind computes the first of them and samples nothing (`num_moot`). If the mask was late, the row behind
computes nothing that counts, and the sequence gets its next row when none is planned any more (`is_behind`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.scheduling.plan import PlannedRow
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState

SHARED_PART = 8
"""The part of the token budget that forced tokens take, at most, if unconstrained rows share the step."""


@dataclass(slots=True)
class Unsettled:
    """A sequence whose rows in flight were planned for another token than came. `num_moot`: tokens that they were to
    sample, and that a grammar forced before. `is_behind`: they compute a token that is not known, as its mask was
    late."""

    num_moot: int = 0
    is_behind: bool = False


class ForcedTokens:
    """The forced tokens of one scheduler's sequences."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.jumping: set[Sequence] = set()
        """The sequences here whose steps may bring tokens that their grammars force, beside the sampled one."""
        self.unsettled: dict[Sequence, Unsettled] = {}
        self._is_used = settings.jump_forward
        self._samples_behind = settings.samples_behind

    def begin(self, sequence: Sequence) -> None:
        """A sequence joins the scheduler."""
        sampling = sequence.sampling
        # The model's log-probability of a forced token is not known until the next step, so none is forced then. A
        # grammar may force what limits of tokens forbid, which sampling under both masks finds out.
        may_jump = sampling.is_constrained and sampling.logprobs is None and not sampling.limits_tokens
        if self._is_used and may_jump and not sequence.prefill_only:
            self.jumping.add(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A sequence leaves. Rows of it may still be in flight."""
        self.jumping.discard(sequence)

    def are_awaited(self, rows: Seq[PlannedRow]) -> bool:
        """Returns whether to plan the next step when the one in flight is committed, since grammars may force tokens
        there that should be in it.

        If the runner can sample rows with grammars behind a step in flight, the step waits only if grammars may force
        tokens in all rows. Planned behind, forced tokens enter one step later, but other rows do not wait.
        """
        finished = SequenceState.FINISHED
        sampled = [row.sequence for row in rows if row.sample and row.sequence.state is not finished]
        if not any(sequence.sampling.is_constrained for sequence in sampled):
            return False
        return not self._samples_behind or self.jumping.issuperset(sampled)

    def row_ended(self, row: PlannedRow) -> None:
        """A row of an unsettled sequence has ended, or does not run."""
        sequence, found = row.sequence, self.unsettled[row.sequence]
        if row.sample and found.num_moot:
            found.num_moot -= 1
            sequence.num_expected += 1  # the sample was not expected any more
        found.is_behind = found.is_behind and sequence.num_planned > 0
        if not found.num_moot and not found.is_behind:
            del self.unsettled[sequence]

    def brought_several(self, sequence: Sequence) -> None:
        """A row brought several tokens, and the rows behind it were planned for one."""
        if sequence.num_expected:
            sequence.num_expected -= 1
            self.unsettled.setdefault(sequence, Unsettled()).num_moot += 1

    def was_late(self, sequence: Sequence) -> None:
        """A row brought no token, as the mask was late."""
        if sequence.num_planned:
            self.unsettled.setdefault(sequence, Unsettled()).is_behind = True

    def is_behind(self, sequence: Sequence) -> bool:
        """Returns whether a row in flight computes a token that is not known."""
        found = self.unsettled.get(sequence)
        return found is not None and found.is_behind

    def add_runs(
        self, places: Seq[int], rows: list[PlannedRow], *, budget_left: int, num_running: int, has_others: bool
    ) -> dict[Sequence, int]:
        """Adds forced tokens to the rows at these places. Returns the number of tokens of these rows.

        Forced tokens take what is left of the token budget beside one token for each running sequence, and at most a
        part of it if unconstrained rows share the step. The rest of a run follows in the next steps.
        """
        num_spare = budget_left - num_running
        if has_others:
            num_spare = min(num_spare, budget_left // SHARED_PART)
        runs: dict[Sequence, int] = {}
        for place in places:
            row, num_remaining = rows[place], rows[place].sequence.num_remaining
            runs[row.sequence] = num_tokens = min(num_remaining, 1 + max(0, num_spare))
            rows[place] = PlannedRow(row.sequence, row.position, num_tokens, False, num_tokens == num_remaining)
            num_spare -= num_tokens - 1
        return runs
