"""How many drafts pay: none if they are often rejected, or if the step has so many tokens that each costs its time.

Long matches predict more than short ones, and the sequence's own text more than that of others. So acceptance rates are
by the kind of the match: the length, in classes of a power of two, and whose text it is in.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.scheduling.step_cost import StepCost

MARGIN = 1.25  # a draft must gain this many times its estimated cost
_FORGETTING = 0.9  # weight of a sequence's earlier drafts when newer ones are verified
_FORGETTING_OF_ALL = 0.99
_PRIOR_WEIGHT = 2.0
_FIRST_RATE = 0.7
_LONGEST_PAUSE = 8  # exponent of two, in steps
_SHORTER = 2  # powers of two by which a right guess shortens the pause
_MOST_RATE = 0.995


def kind_of(length: int, *, from_earlier: bool = False) -> int:
    """The kind of a match of so many tokens, in the sequence's own text or in earlier outputs."""
    return 2 * length.bit_length() + from_earlier


class AcceptanceRate:
    """The share of drafts that were accepted, of those before which all were. A draft that only part of the earlier
    places continue with counts as that part of a draft."""

    __slots__ = ("accepted", "forgetting", "tried")

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        self.forgetting = forgetting
        self.accepted = self.tried = 0.0

    def verified(self, shares: Seq[float], num_accepted: int) -> None:
        """Drafts with these shares were verified."""
        self.accepted = self.accepted * self.forgetting + num_accepted
        self.tried = self.tried * self.forgetting + sum(shares[: num_accepted + 1])

    def estimate(self, prior: float) -> float:
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class AcceptanceRates:
    """Acceptance rates by the kind of the match."""

    __slots__ = ("_by_kind", "_forgetting")

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        self._forgetting = forgetting
        self._by_kind: dict[int, AcceptanceRate] = {}

    def of(self, kind: int) -> AcceptanceRate:
        """The rate behind matches of this kind."""
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = AcceptanceRate(self._forgetting)
        return found


class DraftLength:
    """The number of drafts for one sequence after another of a step.

    A step of N tokens that brings each of B sequences a token takes f + cN. One more token, accepted with probability
    q, raises the tokens per second if q / c > B / (f + cN). The i-th draft is accepted with the i-th power of the
    acceptance rate, times the shares of the drafts up to it.
    """

    def __init__(self) -> None:
        self._all = AcceptanceRates(_FORGETTING_OF_ALL)
        self._least_probability = 0.0

    def begin_step(self, cost: StepCost, num_sequences: int, num_tokens: int) -> None:
        """A step of so many sequences and tokens is planned."""
        step_s = cost.fixed_s + cost.token_s * num_tokens
        self._least_probability = MARGIN * cost.token_s * num_sequences / step_s if step_s > 0 else 1.0

    @property
    def may_pay(self) -> bool:
        """Returns whether drafts that are nearly always accepted would pay in this step."""
        return self._least_probability < _MOST_RATE

    def choose(self, own: AcceptanceRates, kind: int, shares: Seq[float]) -> tuple[int, float]:
        """Returns how many of the drafts with these shares pay, behind a match of this kind, for a sequence with these
        rates; and how many tokens they are expected to bring."""
        rate = min(_MOST_RATE, own.of(kind).estimate(self._all.of(kind).estimate(_FIRST_RATE)))
        count, expected, probability = 0, 0.0, 1.0
        for share in shares:
            probability *= rate * share
            if probability <= self._least_probability:
                break
            count += 1
            expected += probability
        return count, expected

    def verified(self, own: AcceptanceRates, kind: int, shares: Seq[float], num_accepted: int) -> None:
        """Drafts with these shares, or a guess, of a sequence behind a match of this kind were verified."""
        own.of(kind).verified(shares, num_accepted)
        self._all.of(kind).verified(shares, num_accepted)


class Pause:
    """Steps in which a sequence looks for no drafts, since they do not pay."""

    __slots__ = ("_exponent", "_until")

    def __init__(self) -> None:
        self._exponent = self._until = 0

    def is_over(self, step: int) -> bool:
        """Returns whether the sequence looks for drafts in this step."""
        return step >= self._until

    def begin(self, step: int) -> None:
        """Drafts do not pay. Each pause is twice as long as the one before."""
        self._exponent = min(_LONGEST_PAUSE, self._exponent + 1)
        self._until = step + (1 << self._exponent)

    def shorten(self, step: int) -> None:
        """A guess was right."""
        self._exponent = max(0, self._exponent - _SHORTER)
        self._until = min(self._until, step + (1 << self._exponent) - 1)

    def end(self) -> None:
        """Drafts were accepted."""
        self._exponent = self._until = 0
