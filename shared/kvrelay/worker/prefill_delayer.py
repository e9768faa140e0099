"""Connects the prefill delayer to a scheduler: one exchange and one decision per pass, and counters of the outcomes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.scheduling.queue.prefill_delay import (
    DelayDecision,
    DelayerSettings,
    DelayerState,
    DelayReason,
    GroupExchange,
    RankLoad,
    decide,
)


@dataclass(slots=True)
class DelayerTotals:
    """Counters since the start. `num_delayed_passes` and `waiting_s` count prompts on this rank.

    `num_ran`, `num_idle`: passes in which this rank asked and was allowed, and then admitted a prompt, or did not (for
    lack of blocks, for example). `by_reason`: decisions of the passes in which this rank asked.
    """

    num_delayed_passes: int = 0
    waiting_s: float = 0.0
    num_ran: int = 0
    num_idle: int = 0
    by_reason: dict[DelayReason, int] = field(default_factory=dict)


class PrefillDelayer:
    """Implements `PrefillGate`. A rank that is not asked in a pass joins the exchange as not prefillable."""

    def __init__(
        self, settings: DelayerSettings, exchange: GroupExchange, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.totals = DelayerTotals()
        self._exchange = exchange
        self._clock = clock
        self._state = DelayerState()
        self._largest_prefill = 0
        self._decision: DelayDecision | None = None  # the decision of this pass; None: not decided yet
        self._waiting_since: float | None = None

    def ask(self, num_running: int, kv_usage: float) -> str:
        """Returns why no prompt may be admitted in this pass, or "" if prompts may. It decides once per pass, however
        often it is called."""
        if self._decision is None:
            low = self.settings.low_watermark
            forced = low is not None and kv_usage < low
            decision = self._decide(RankLoad(1, int(forced), num_running, self._largest_prefill))
            if not decision.allowed and self._is_overdue():
                self._state = DelayerState(0, self._state.all_had)
                decision = DelayDecision(True, "the longest wait is over")
            self._decision = decision
            self._count(self._decision)
        return "" if self._decision.allowed else f"delayed: {self._decision.reason}"

    def passed(self, num_running: int, num_admitted: int) -> None:
        """Called when the pass is planned. `num_admitted` prompts were admitted."""
        if self._decision is None:
            self._decide(RankLoad(0, 0, num_running, self._largest_prefill))
            self._stop_waiting()  # no prompt is held back here; one that was may have been cancelled
        elif self._decision.allowed:
            self.totals.num_ran += bool(num_admitted)
            self.totals.num_idle += not num_admitted
        self._largest_prefill = max(self._largest_prefill, num_admitted)
        self._decision = None

    def remaining_delay_s(self) -> float:
        if self._waiting_since is None or math.isinf(self.settings.max_wait_s):
            return math.inf
        return max(0.0, self._waiting_since + self.settings.max_wait_s - self._clock())

    def _is_overdue(self) -> bool:
        return self._waiting_since is not None and self.remaining_delay_s() <= 0

    def _decide(self, load: RankLoad) -> DelayDecision:
        self._state, decision = decide(self._state, self._exchange.share(load), self.settings)
        return decision

    def _count(self, decision: DelayDecision) -> None:
        totals = self.totals
        totals.by_reason[decision.reason] = totals.by_reason.get(decision.reason, 0) + 1
        if not decision.allowed:
            totals.num_delayed_passes += 1
            if self._waiting_since is None:
                self._waiting_since = self._clock()
        else:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting_since is not None:
            self.totals.waiting_s += self._clock() - self._waiting_since
            self._waiting_since = None

    def status(self) -> dict[str, float]:
        """The totals as a flat mapping for a worker's status. Reasons are joined to one word."""
        totals = self.totals
        return {
            "prefill_delayed_passes": totals.num_delayed_passes,
            "prefill_delay_s": totals.waiting_s,
            "prefill_allowed_ran": totals.num_ran,
            "prefill_allowed_idle": totals.num_idle,
            **{f"prefill_delayer: {reason}": count for reason, count in totals.by_reason.items()},
        }
