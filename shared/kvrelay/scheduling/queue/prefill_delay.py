"""The prefill delayer: ranks that run both phases admit prompts together, or wait (SGLang's prefill delayer).

If ranks step together, a step lasts as long as its slowest rank: a rank that computes a prompt alone makes the decodes
of all others wait. So prompts wait, within bounds, until every rank has one. If all have one, they wait until enough
slots are free for a whole batch of prompts, instead of being admitted one by one.

A few integers per rank and pass decide. State is immutable and the decision is a pure function: ranks that step
together pass it the same loads and decide alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

log = logging.getLogger(__name__)

Estimation = Literal["all", "mixed", "none"]
"""The ranks that have a prompt to admit."""

DelayReason = Literal["", "no_wait", "wait_success", "delay", "wait_timeout"]


@dataclass(frozen=True, slots=True)
class DelayerSettings:
    """`max_delay_passes`: prompts of some ranks wait for so many passes less one. `max_wait_s`: no prompt is held back
    for longer, whatever the others have."""

    max_running: int
    max_delay_passes: int = 30
    max_wait_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s = {self.max_wait_s}: must be above 0")
        if self.max_running < 1 or self.max_delay_passes < 1:
            raise ValueError("max_running and max_delay_passes must be at least 1")


class RankLoad(NamedTuple):
    """What a rank gives the others in a pass. All are integers, so that they fit one small all-gather.

    `prefillable`: 1 if it could admit a prompt; `num_running`: its running batch; `largest_prefill`: the most prompts
    that it has admitted in one pass so far; `overdue`: 1 if its prompts have waited for `max_wait_s`.
    """

    prefillable: int
    num_running: int
    largest_prefill: int
    overdue: int = 0


NO_LOAD = RankLoad(0, 0, 0)


@dataclass(frozen=True, slots=True)
class DelayerState:
    """`num_delayed`: passes for which prompts have waited by now. `has_let_through`: once, all ranks had prompts and
    too few slots were free."""

    num_delayed: int = 0
    has_let_through: bool = False


@dataclass(frozen=True, slots=True)
class DelayDecision:
    """Whether prompts may be admitted in this pass. The same on every rank."""

    allowed: bool
    estimation: Estimation
    reason: DelayReason


def decide(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> tuple[DelayerState, DelayDecision]:
    """The decision about a pass, and the state for the next one."""
    num_prefillable = sum(load.prefillable for load in loads)
    estimation: Estimation = "mixed" if 0 < num_prefillable < len(loads) else "all" if num_prefillable else "none"
    has_let_through = state.has_let_through
    reason: DelayReason = "wait_timeout" if any(load.overdue for load in loads) else ""
    if estimation == "none":
        reason = ""
    elif not reason and estimation == "all":
        is_short = _lacks_slots(loads, settings)
        # The first time, the running batch has not reached its full size yet.
        reason = "delay" if is_short and has_let_through else "wait_success" if state.num_delayed else "no_wait"
        has_let_through = has_let_through or is_short
    elif not reason:
        reason = "delay" if state.num_delayed < settings.max_delay_passes - 1 else "wait_timeout"
    allowed = reason != "delay"
    state = DelayerState(0 if allowed else state.num_delayed + 1, has_let_through)
    return state, DelayDecision(allowed, estimation, reason)


def _lacks_slots(loads: Seq[RankLoad], settings: DelayerSettings) -> bool:
    num_free = settings.max_running - max(load.num_running for load in loads)
    return num_free < min(settings.max_running, max(load.largest_prefill for load in loads))


@dataclass(slots=True)
class DelayerTotals:
    """Counters since the start. `num_delayed_passes` and `waiting_s` count prompts on this rank.

    `num_ran`, `num_idle`: passes in which this rank could admit a prompt and was allowed, and then admitted one, or did
    not (for lack of blocks, for example). `outcomes`: passes of the group by the ranks with a prompt, and the reason.
    """

    num_delayed_passes: int = 0
    waiting_s: float = 0.0
    num_ran: int = 0
    num_idle: int = 0
    outcomes: Counter[tuple[Estimation, DelayReason]] = field(default_factory=Counter)


class PrefillDelayer:
    """May hold back all prompts of a pass, which is one plan. Running prompts continue without asking.

    Ranks that step together exchange their loads at the begin of a pass, and each calls `begin_pass` with all of them.
    A worker of its own decides when it is asked. A rank that is not asked in a pass counts as not prefillable.
    """

    def __init__(self, settings: DelayerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.totals = DelayerTotals()
        self._clock = clock
        self._state = DelayerState()
        self._largest_prefill = 0
        self._decision: DelayDecision | None = None  # the decision of this pass; None: not decided yet
        self._own: RankLoad | None = None  # this rank's load in that decision
        self._waiting_since: float | None = None

    def load(self, num_running: int, *, prefillable: bool) -> RankLoad:
        """This rank's load. `prefillable`: it could admit a prompt now."""
        overdue = prefillable and self._waiting_since is not None and self.remaining_delay_s() <= 0
        return RankLoad(int(prefillable), num_running, self._largest_prefill, int(overdue))

    def begin_pass(self, loads: Seq[RankLoad], rank: int = 0) -> None:
        """Decides about a pass. `loads`: of all ranks, among which this is number `rank`."""
        self._state, decision = decide(self._state, loads, self.settings)
        self._decision, self._own = decision, loads[rank]
        self.totals.outcomes[decision.estimation, decision.reason] += 1
        if decision.allowed or not self._own.prefillable:
            self._stop_waiting()  # no prompt is held back here; one that was may have been cancelled
        else:
            self.totals.num_delayed_passes += 1
            if self._waiting_since is None:
                self._waiting_since = self._clock()

    def ask(self, num_running: int) -> str:
        """Returns why no prompt may be admitted in this pass, or "" if prompts may. It decides once per pass, however
        often it is called."""
        if self._decision is None:
            self.begin_pass([self.load(num_running, prefillable=True)])
        assert self._decision is not None
        assert self._own is not None
        if not self._own.prefillable:
            return "delayed: there was no prompt when the pass began"
        if self._decision.allowed:
            return ""
        is_mixed = self._decision.estimation == "mixed"
        return "delayed: some ranks have no prompt" if is_mixed else "delayed: too few slots are free"

    def passed(self, num_running: int, num_admitted: int) -> None:
        """Called when the pass is planned. `num_admitted` prompts were admitted."""
        if self._decision is None:
            self.begin_pass([self.load(num_running, prefillable=False)])
        decision, own = self._decision, self._own
        assert decision is not None
        assert own is not None
        if own.prefillable and decision.allowed:
            self.totals.num_ran += bool(num_admitted)
            self.totals.num_idle += not num_admitted
        self._largest_prefill = max(self._largest_prefill, num_admitted)
        if decision.estimation != "none" and log.isEnabledFor(logging.DEBUG):
            verdict = "admit" if decision.allowed else "delay"
            log.debug(
                "prefill delayer: %s ranks have a prompt: %s (%s), %d passes delayed; %d admitted here",
                decision.estimation,
                verdict,
                decision.reason,
                self._state.num_delayed,
                num_admitted,
            )
        self._decision = self._own = None

    def remaining_delay_s(self) -> float:
        if self._waiting_since is None or math.isinf(self.settings.max_wait_s):
            return math.inf
        return max(0.0, self._waiting_since + self.settings.max_wait_s - self._clock())

    def _stop_waiting(self) -> None:
        if self._waiting_since is not None:
            self.totals.waiting_s += self._clock() - self._waiting_since
            self._waiting_since = None

    def status(self) -> dict[str, float]:
        """The totals as a flat mapping for a worker's status. An outcome is one word: `mixed.delay`."""
        totals = self.totals
        return {
            "prefill_delayed_passes": totals.num_delayed_passes,
            "prefill_delay_s": totals.waiting_s,
            "prefill_allowed_ran": totals.num_ran,
            "prefill_allowed_idle": totals.num_idle,
            **{
                f"prefill_delayer.{estimation}.{reason or 'no_prompt'}": count
                for (estimation, reason), count in totals.outcomes.items()
            },
        }
