"""Medians over rounds, and ratios between servers within a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Statistic:
    """Median, least and most over rounds."""

    median: float
    least: float
    most: float

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """Returns text such as `12 (10 to 15)`, or the median alone if all rounds are equal."""
        middle, least, most = (f"{scale * value:,.{digits}f}" for value in (self.median, self.least, self.most))
        return middle if self.least == self.most else f"{middle} ({least} to {most})"


def statistic(values: Sequence[float]) -> Statistic | None:
    """None without values."""
    return Statistic(median(values), min(values), max(values)) if values else None


def ratio(base: Mapping[int, float], other: Mapping[int, float]) -> Statistic | None:
    """The ratio of `other` to `base` over the rounds that have both. None if there is no such round."""
    return statistic([value / base[number] for number, value in sorted(other.items()) if base.get(number)])


@dataclass(frozen=True, slots=True)
class Best:
    """The best server of a figure. `is_clear`: its worst round is better than the best round of every other server."""

    server: str
    is_clear: bool


def best(values: Mapping[str, Statistic], *, higher: bool) -> Best | None:
    """None for fewer than two servers, which are no comparison."""
    if len(values) < 2:
        return None
    sign = 1.0 if higher else -1.0
    winner = max(values, key=lambda name: sign * values[name].median)
    worst_of_winner = values[winner].least if higher else -values[winner].most
    best_of_others = max((each.most if higher else -each.least) for name, each in values.items() if name != winner)
    return Best(winner, is_clear=worst_of_winner > best_of_others)
