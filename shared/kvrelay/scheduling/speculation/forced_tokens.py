"""Tokens that grammars force: which sequences have any, how many a step computes, and when a step waits for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.scheduling.plan import PlannedRow
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence

SHARED_PART = 8
"""The part of the token budget that forced tokens take, at most, if unconstrained rows share the step and the settings
name no number."""


class ForcedTokens:
    """The forced tokens of one scheduler's sequences."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._is_used = settings.jump_forward
        self._most_shared = settings.max_shared_forced_tokens
        self._samples_behind = settings.samples_behind

    def enter(self, sequence: Sequence) -> None:
        """A sequence joins the scheduler."""
        sampling = sequence.sampling
        # The model's log-probability of a forced token is not known until the next step, so none is forced then. A
        # grammar may force what limits of tokens forbid, which sampling under both masks finds out.
        may_jump = sampling.is_constrained and sampling.logprobs is None and not sampling.limits_tokens
        sequence.jumps = self._is_used and may_jump and not sequence.prefill_only

    def are_awaited(self, rows: Seq[PlannedRow]) -> bool:
        """Returns whether to plan the next step when the one in flight is committed, since grammars may force tokens
        there that should be in it.

        If the runner can sample rows with grammars behind a step in flight, the step waits only if grammars may force
        tokens in all rows. Planned behind, forced tokens enter one step later, but other rows do not wait.
        """
        sampled = [row.sequence for row in rows if row.sample]
        if not any(sequence.sampling.is_constrained for sequence in sampled):
            return False
        return not self._samples_behind or all(sequence.jumps for sequence in sampled)

    def add_runs(
        self, places: Seq[int], rows: list[PlannedRow], *, budget_left: int, num_running: int, has_others: bool
    ) -> dict[Sequence, int]:
        """Adds forced tokens to the rows at these places. Returns the number of tokens of these rows.

        Forced tokens take what is left of the token budget beside one token for each running sequence, and at most a
        part of it if unconstrained rows share the step. The rest of a run follows in the next steps.
        """
        num_spare = budget_left - num_running
        if has_others:
            num_spare = min(num_spare, budget_left // SHARED_PART if self._most_shared is None else self._most_shared)
        runs: dict[Sequence, int] = {}
        for place in places:
            row, num_remaining = rows[place], rows[place].sequence.num_remaining
            runs[row.sequence] = num_tokens = min(num_remaining, 1 + max(0, num_spare))
            rows[place] = PlannedRow(row.sequence, row.position, num_tokens, False, num_tokens == num_remaining)
            num_spare -= num_tokens - 1
        return runs
