"""Decodes of a flood take turns beside decodes of a light tenant, if all of them would make steps much longer.

A step computes the decodes of all tenants together, so the gaps of a light tenant grow with the sequences of a flood.
How much depends on the device and the contexts, so it is measured: one step in `PROBE_EVERY_STEPS` leaves the flood
out.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.queue.fair_shares import FairShares
from kvrelay.scheduling.sequence import Sequence

MOST_SLOWDOWN = 1.35
"""The time of a step with decodes of the tenant that has most sequences, at most, over that of one without them."""

LEAST_TURNS = 16
"""Decodes of one tenant that a step holds, whatever they cost."""

PROBE_EVERY_STEPS = 64
SMOOTHING = 0.3
"""The weight of the latest step in a mean of step times."""


class DecodeTurns:
    """The turns in one scheduler."""

    def __init__(self, shares: FairShares) -> None:
        self.least_turns = LEAST_TURNS
        self._shares = shares
        self._heavy = ""
        self._without_s = 0.0  # mean time of a step without tokens of the heavy tenant; 0.0: not measured
        self._each_s: float | None = None  # mean time that one of its tokens adds
        self._num_until_probe = 0
        self.resting: frozenset[Sequence] = frozenset()
        """The decodes that are not in the next step."""
        self.is_probe = False
        """Whether the next step has no tokens of the heavy tenant, so that its time is measured."""
        self._last_turns: dict[Sequence, int] = {}  # last turn of each decode that takes turns
        self._turn = 0

    def measured(self, plan: StepPlan, forward_s: float) -> None:
        """A step took `forward_s`."""
        if not self._heavy or forward_s <= 0 or not self._shares.is_contested:
            return
        num_own = 0
        for row in plan.rows:
            if row.sequence.tenant == self._heavy:
                num_own += row.num_computed
            elif row.is_prefill:
                return  # steps with prompts of others say little about decodes
        if not num_own:
            self._without_s += (forward_s - self._without_s) * (SMOOTHING if self._without_s else 1.0)
        elif self._without_s:
            each_s = (forward_s - self._without_s) / num_own
            self._each_s = each_s if self._each_s is None else self._each_s + SMOOTHING * (each_s - self._each_s)

    def plan_step(self, running: Iterable[Sequence]) -> None:
        """Sets `resting` for the next step, to decodes that were in one of the latest. O(running) if there is a tenant
        with more sequences than `least_turns`."""
        self.resting, self.is_probe = frozenset(), False
        heavy = self._shares.heaviest(self.least_turns)
        if heavy is None:
            self._last_turns = {}
            return
        if heavy != self._heavy:
            self._heavy, self._without_s, self._each_s, self._num_until_probe = heavy, 0.0, None, 0
        num_decodes = dict.fromkeys(self._shares.lighter_than(heavy), 0)
        own: list[Sequence] = []
        may_probe = self._shares.waits_alone(heavy)
        for sequence in running:
            if sequence.is_prompting:
                may_probe = may_probe and sequence.tenant == heavy
            elif sequence.tenant != heavy:
                if sequence.tenant in num_decodes:
                    num_decodes[sequence.tenant] += 1
            elif sequence.beams is None:
                own.append(sequence)
        num_turns = len(own)
        if any(num_decodes.values()):
            self._num_until_probe -= 1
            self.is_probe = may_probe and self._num_until_probe < 0
            num_turns = 0 if self.is_probe else self._num_turns(heavy, num_decodes)
        if self.is_probe:
            self._num_until_probe = PROBE_EVERY_STEPS - 1
        if num_turns >= len(own):
            self._last_turns = {}
            return
        own.sort(key=lambda sequence: self._last_turns.get(sequence, 0))
        self._turn += 1
        resting = {sequence: self._last_turns.get(sequence, 0) for sequence in own[num_turns:]}
        self._last_turns = resting | dict.fromkeys(own[:num_turns], self._turn)
        self.resting = frozenset(resting)

    def _num_turns(self, heavy: str, num_decodes: dict[str, int]) -> int:
        """Returns how many decodes of the tenant a step holds: as many as make it `MOST_SLOWDOWN` times as long, and at
        least as many as a lighter tenant has, by weight."""
        if self._each_s is None or self._each_s <= 0:
            return 1 << 30
        weight = self._shares.of(heavy).weight
        equal = max(count * weight / self._shares.of(tenant).weight for tenant, count in num_decodes.items())
        return max(self.least_turns, int(equal), int((MOST_SLOWDOWN - 1) * self._without_s / self._each_s))
