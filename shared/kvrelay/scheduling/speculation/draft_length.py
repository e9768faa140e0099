"""How many drafts pay: none if they are often rejected, or if the step has so many tokens that each costs its time."""

from __future__ import annotations

from math import log

from kvrelay.scheduling.step_cost import StepCost

MARGIN = 1.25  # by so much a draft must gain more than it is estimated to cost
_FORGETTING = 0.9  # weight of a sequence's earlier drafts when newer ones are verified
_FORGETTING_OF_ALL = 0.99
_PRIOR_WEIGHT = 2.0
_FIRST_RATE = 0.7
_LONGEST_PAUSE = 8  # as a power of two, in steps
_MOST_RATE = 0.995


class AcceptanceRate:
    """The share of drafts that were accepted, of those before which all were."""

    __slots__ = ("accepted", "forgetting", "tried")

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        self.forgetting = forgetting
        self.accepted = self.tried = 0.0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.accepted = self.accepted * self.forgetting + num_accepted
        self.tried = self.tried * self.forgetting + num_accepted + (num_accepted < num_drafts)

    def estimate(self, prior: float) -> float:
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class DraftLength:
    """The number of drafts for one sequence after another of a step.

    A step of N tokens that brings each of B sequences a token takes f + cN. One more token, accepted with probability
    q, raises the tokens per second if q / c > B / (f + cN). The i-th draft is accepted with the i-th power of the
    acceptance rate. A sequence whose drafts do not pay pauses, for twice as many steps each time, and then tries one.
    """

    def __init__(self) -> None:
        self._all = AcceptanceRate(_FORGETTING_OF_ALL)
        self._least_probability = 0.0

    def begin_step(self, cost: StepCost, num_sequences: int, num_tokens: int) -> None:
        """A step of so many sequences and tokens is planned."""
        step_s = cost.fixed_s + cost.token_s * num_tokens
        self._least_probability = MARGIN * cost.token_s * num_sequences / step_s if step_s > 0 else 1.0

    def choose(self, own: AcceptanceRate, most: int) -> int:
        """Returns how many drafts of a sequence with this rate pay, up to `most`."""
        rate = min(_MOST_RATE, own.estimate(self._all.estimate(_FIRST_RATE)))
        if self._least_probability >= rate:
            return 0
        if self._least_probability <= 0:
            return most
        return min(most, int(log(self._least_probability) / log(rate)))

    def verified(self, own: AcceptanceRate, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a sequence were verified."""
        own.verified(num_drafts, num_accepted)
        self._all.verified(num_drafts, num_accepted)


class Pause:
    """Steps in which a sequence looks for no drafts."""

    __slots__ = ("_exponent", "_left")

    def __init__(self) -> None:
        self._exponent = self._left = 0

    def is_over(self) -> bool:
        """Called in each step. Returns whether the sequence may look for drafts in it."""
        if self._left:
            self._left -= 1
            return False
        return True

    def begin(self) -> bool:
        """Drafts do not pay. Returns whether the sequence may try one nevertheless: it has just paused."""
        tries = self._exponent > 0
        self._exponent = min(_LONGEST_PAUSE, self._exponent + 1)
        self._left = 1 << self._exponent
        return tries

    def end(self) -> None:
        """Drafts pay."""
        self._exponent = self._left = 0
