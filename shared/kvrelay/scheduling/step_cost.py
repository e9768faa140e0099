"""What a step costs: a fixed part, a part for each token, and one for each pair of a token and what it attends to.

The coefficients start from those given and follow the measured steps: least squares with forgetting, pulled towards
the given ones (scaled to the machine's speed) where the steps so far say nothing, and never negative.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.995  # a step's weight after each further one
SOLVE_EVERY_STEPS = 8
PULL = 0.01  # weight of the given coefficients, against that of the measured steps

_SCALES = np.array([1.0, 1e-3, 1e-6])  # brings steps of a thousand tokens that attend to a thousand near 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: `fixed_s` a step, `token_s` a token, `pair_s` a pair. The defaults' ratio is that of a model of width
    1,400: attending costs 4 * width operations a pair and layer, everything else 24 * width squared a token.
    """

    fixed_s: float = 1e-3
    token_s: float = 1e-4
    pair_s: float = 1e-4 / 8192

    def step_s(self, num_tokens: float, num_pairs: float) -> float:
        return self.fixed_s + self.token_s * num_tokens + self.pair_s * num_pairs

    def tokens_within(self, seconds: float, position: int) -> int:
        """The longest chunk from `position` on that adds at most `seconds`: token_s n + pair_s (n position + n^2/2)."""
        if seconds <= 0:
            return 0
        linear = self.token_s + self.pair_s * position
        if linear + self.pair_s == 0:
            return 1 << 30
        # The stable form of the quadratic's root: no difference of nearly equal numbers when pair_s is small.
        return int(2 * seconds / (linear + sqrt(linear * linear + 2 * self.pair_s * seconds)) + 1e-6)


@dataclass(frozen=True, slots=True)
class CostSample:
    """A step of `num_tokens` tokens and `num_pairs` pairs took `seconds`."""

    num_tokens: int
    num_pairs: float
    seconds: float


def pairs(position: int, num_tokens: int) -> float:
    """Pairs of a chunk's tokens and those they attend to."""
    return num_tokens * (position + num_tokens / 2)


class CalibratedCost:
    """A `StepCost` that follows what steps took."""

    def __init__(self, given: StepCost = StepCost()) -> None:
        self.current = given
        self._given = np.array([given.fixed_s, given.token_s, given.pair_s]) / _SCALES
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._num_observed = 0

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Records a step that took `seconds`. Ignores steps without a measured time."""
        if seconds <= 0 or num_tokens < 1:
            return
        features = np.array([1.0, num_tokens, num_pairs]) * _SCALES / seconds  # relative errors: short steps count too
        self._products = self._products * FORGETTING + np.outer(features, features)
        self._targets = self._targets * FORGETTING + features
        self._num_observed += 1
        if self._num_observed % SOLVE_EVERY_STEPS == 0:
            self._solve()

    def fitted(self) -> StepCost:
        """Fits the coefficients to all steps observed so far and returns them."""
        if self._num_observed:
            self._solve()
        return self.current

    def _solve(self) -> None:
        slowness = float(self._given @ self._targets / (self._given @ self._products @ self._given))
        pull = PULL * np.diag(np.diag(self._products))
        fitted = _non_negative(self._products + pull, self._targets + pull @ self._given * slowness) * _SCALES
        if fitted[1] > 0:
            self.current = StepCost(*fitted.tolist())


def fit(samples: Seq[CostSample], given: StepCost = StepCost()) -> StepCost:
    """The cost that these samples tell; `given` where they do not."""
    cost = CalibratedCost(given)
    for sample in samples:
        cost.observe(sample.num_tokens, sample.num_pairs, sample.seconds)
    return cost.fitted()


def _non_negative(products: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solves the normal equations; a coefficient that would be negative is left out, the most negative one first."""
    kept = list(range(len(targets)))
    solution = np.zeros(len(targets))
    while kept:
        part = np.linalg.solve(products[np.ix_(kept, kept)], targets[kept])
        if part.min() >= 0:
            solution[kept] = part
            break
        del kept[int(part.argmin())]
    return solution
