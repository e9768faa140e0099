"""What a process's metrics are at one moment: made when somebody reads them, whether a page or an exporter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvrelay.protocol.messages import HistogramReport

Labels = tuple[tuple[str, str], ...]
"""Attributes of a point, in the order of the metric's attributes."""


class MetricSample(NamedTuple):
    """One value of a metric."""

    labels: Labels
    value: float | HistogramReport


MetricSamples = dict[str, list[MetricSample]]
"""By the metric's name in the catalogue."""


def samples_by(attribute: str, values: Mapping[str, float]) -> list[MetricSample]:
    """One point a value of an attribute."""
    return [MetricSample(((attribute, key),), value) for key, value in values.items()]


def single_sample(value: float) -> list[MetricSample]:
    """A metric without attributes."""
    return [MetricSample((), value)]


def merged(parts: Iterable[MetricSamples]) -> MetricSamples:
    """Several sources' samples; a metric of several sources has the samples of all."""
    whole: MetricSamples = {}
    for part in parts:
        for name, found in part.items():
            whole.setdefault(name, []).extend(found)
    return whole
