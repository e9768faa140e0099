"""What a process's metrics are at one moment: made when somebody reads them, whether a page or an exporter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvrelay.protocol.messages import HistogramReport

Labels = tuple[tuple[str, str], ...]
"""Attributes of a point, in the order of the metric's attributes."""


class Point(NamedTuple):
    """One value of a metric."""

    labels: Labels
    value: float | HistogramReport


Readings = dict[str, list[Point]]
"""By the metric's name in the catalogue."""


def points(attribute: str, values: Mapping[str, float]) -> list[Point]:
    """One point a value of an attribute."""
    return [Point(((attribute, key),), value) for key, value in values.items()]


def plain(value: float) -> list[Point]:
    """A metric without attributes."""
    return [Point((), value)]


def merged(parts: Iterable[Readings]) -> Readings:
    """Several sources' readings; a metric of several sources has the points of all."""
    whole: Readings = {}
    for part in parts:
        for name, found in part.items():
            whole.setdefault(name, []).extend(found)
    return whole
