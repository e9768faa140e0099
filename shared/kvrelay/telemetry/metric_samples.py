"""Metric samples of a process at one moment, made when a page or an exporter reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvrelay.protocol.messages import HistogramReport

Labels = tuple[tuple[str, str], ...]
"""Attributes and values of a sample, in the order of the metric's attributes."""


class MetricSample(NamedTuple):
    """One value of a metric with its labels."""

    labels: Labels
    value: float | HistogramReport


MetricSamples = dict[str, list[MetricSample]]
"""Samples by the metric's name in the catalogue."""


def samples_by(attribute: str, values: Mapping[str, float]) -> list[MetricSample]:
    """One sample per value of an attribute."""
    return [MetricSample(((attribute, key),), value) for key, value in values.items()]


def single_sample(value: float) -> list[MetricSample]:
    """The sample of a metric without attributes."""
    return [MetricSample((), value)]


def merged(parts: Iterable[MetricSamples]) -> MetricSamples:
    """Merges samples of several sources; a metric keeps the samples of all of them."""
    whole: MetricSamples = {}
    for part in parts:
        for name, found in part.items():
            whole.setdefault(name, []).extend(found)
    return whole
