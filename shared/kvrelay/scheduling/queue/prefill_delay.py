"""The prefill delayer: workers that run both phases admit prompts together, or wait (SGLang's prefill delayer).

If ranks step together, a step lasts as long as its slowest rank: a rank that computes a prompt alone makes the decodes
of all others wait. If ranks share a machine, that prompt takes cores and memory bandwidth from them. So prompts wait,
within bounds, until every rank has one. If all have one, they wait until enough slots are free for a whole batch of
prompts, instead of being admitted one by one.

Four integers per rank and pass decide. State is immutable and the decision is a pure function: ranks that step together
pass it the same loads and decide alike. Other ranks pass it the loads that they know (`worker/delayer_group.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

DelayReason = Literal[
    "nobody has a prompt",
    "all have prompts, for the first time",
    "all have prompts, and slots are free",
    "all have prompts, but too few slots are free",
    "some have no prompt, and a cache is nearly empty",
    "some have no prompt, and the wait was long enough",
    "the longest wait is over",
    "some have no prompt",
]


@dataclass(frozen=True, slots=True)
class DelayerSettings:
    """`max_delay_passes`: prompts of some ranks wait for so many passes less one. `low_watermark`: share of the KV pool
    in use below which a rank with a prompt does not wait for others; None: it always does. `max_wait_s`: no prompt is
    held back for longer, whatever the others have; it is up to each rank, so ranks in step need it large."""

    max_running: int
    max_delay_passes: int = 30
    low_watermark: float | None = None
    max_wait_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s = {self.max_wait_s}: must be above 0")
        if self.max_running < 1 or self.max_delay_passes < 1:
            raise ValueError("max_running and max_delay_passes must be at least 1")
        if self.low_watermark is not None and not 0 <= self.low_watermark <= 1:
            raise ValueError(f"low_watermark = {self.low_watermark}: must be 0 to 1")


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank tells the others in a pass. All are integers, so that they fit one small all-gather.

    `prefillable`: 1 if it could admit a prompt; `forced`: 1 if it could and its KV usage is below the low watermark;
    `num_running`: its running batch; `largest_prefill`: the most prompts that it has admitted in one pass so far.
    """

    prefillable: int
    forced: int
    num_running: int
    largest_prefill: int


@dataclass(frozen=True, slots=True)
class DelayerState:
    """`num_delayed`: passes for which prompts have waited by now. `all_had`: once, all ranks had prompts."""

    num_delayed: int = 0
    all_had: bool = False


@dataclass(frozen=True, slots=True)
class DelayDecision:
    """Whether prompts may be admitted in this pass. The same on every rank."""

    allowed: bool
    reason: DelayReason


class GroupExchange(Protocol):
    """Exchanges loads between the ranks of a group. Every rank calls `share` exactly once per pass."""

    def share(self, load: RankLoad) -> Seq[RankLoad]:
        """Tells this rank's load, and returns all that are known, its own among them."""
        ...


class LocalExchange:
    """A group of one."""

    def share(self, load: RankLoad) -> Seq[RankLoad]:
        """The load itself."""
        return (load,)


def decide(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> tuple[DelayerState, DelayDecision]:
    """The decision about a pass, and the state for the next one."""
    num_prefillable = sum(load.prefillable for load in loads)
    if not num_prefillable:
        return state, DelayDecision(True, "nobody has a prompt")
    if num_prefillable == len(loads):
        decision = _when_all(state, loads, settings)
        state = DelayerState(state.num_delayed, all_had=True)
    else:
        decision = _when_some(state, loads, settings)
    return DelayerState(0 if decision.allowed else state.num_delayed + 1, state.all_had), decision


def _when_all(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> DelayDecision:
    if not state.all_had:
        return DelayDecision(True, "all have prompts, for the first time")
    num_free = settings.max_running - max(load.num_running for load in loads)
    wanted = min(settings.max_running, max(load.largest_prefill for load in loads))
    if num_free < wanted:
        return DelayDecision(False, "all have prompts, but too few slots are free")
    return DelayDecision(True, "all have prompts, and slots are free")


def _when_some(state: DelayerState, loads: Seq[RankLoad], settings: DelayerSettings) -> DelayDecision:
    if any(load.forced for load in loads):
        return DelayDecision(True, "some have no prompt, and a cache is nearly empty")
    if state.num_delayed >= settings.max_delay_passes - 1:
        return DelayDecision(True, "some have no prompt, and the wait was long enough")
    return DelayDecision(False, "some have no prompt")
