"""The prefill delayer: ranks that run both phases admit prompts together, or wait (SGLang's prefill delayer).

If ranks step together, a step lasts as long as its slowest rank: a rank that computes a prompt alone makes the decodes
of all others wait. So prompts wait, within bounds, until every rank has one. If all have one, they wait until enough
slots are free for a whole batch of prompts, instead of being admitted one by one.

A few integers per rank and pass decide. State is immutable and the decision is a pure function: ranks that step
together pass it the same loads and decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from typing import Literal, Self

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


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank gives the others in a pass. All are integers, so that they fit one small all-gather.

    `prefillable`: 1 if it could admit a prompt; `num_running`: its running batch; `largest_prefill`: the most prompts
    that it has admitted in one pass so far; `overdue`: 1 if its prompts have waited for `max_wait_s`.
    """

    prefillable: int
    num_running: int
    largest_prefill: int
    overdue: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integers to exchange."""
        return astuple(self)

    @classmethod
    def of(cls, numbers: Seq[int]) -> Self:
        """The load with these `numbers`."""
        return cls(*numbers)


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
    has_let_through, reason = state.has_let_through, _reason_to_allow(loads)
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


def _reason_to_allow(loads: Seq[RankLoad]) -> DelayReason:
    """Why prompts are admitted whatever other ranks have, or ""."""
    return "wait_timeout" if any(load.overdue for load in loads) else ""


def _lacks_slots(loads: Seq[RankLoad], settings: DelayerSettings) -> bool:
    num_free = settings.max_running - max(load.num_running for load in loads)
    return num_free < min(settings.max_running, max(load.largest_prefill for load in loads))
