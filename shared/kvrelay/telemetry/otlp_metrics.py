"""Converts metric samples to the SDK's data for its exporters. Imports the SDK.

Data is cumulative, like the samples; histograms keep their buckets.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvrelay.protocol.messages import HistogramReport
from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.metrics import MetricSample, MetricSamples

CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(samples: MetricSamples, resource: Any, started_ns: int, now_ns: int) -> Any:
    """Converts samples by metric name. Raises KeyError for a metric that is not in the catalogue."""
    metrics = [_metric(name, samples[name], started_ns, now_ns) for name in sorted(samples)]
    scope = ScopeMetrics(InstrumentationScope("kvrelay"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(name: str, points: list[MetricSample], started_ns: int, now_ns: int) -> Metric:
    metric = METRICS[name]
    data: Sum | Gauge | Histogram
    if metric.kind == "histogram":
        data = Histogram([_buckets(point, started_ns, now_ns) for point in points], CUMULATIVE)
    elif metric.kind == "counter":
        data = Sum([_number(point, started_ns, now_ns) for point in points], CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([_number(point, None, now_ns) for point in points])
    return Metric(name, metric.text, metric.unit, data)


def _number(point: MetricSample, started_ns: int | None, now_ns: int) -> NumberDataPoint:
    assert not isinstance(point.value, HistogramReport)
    return NumberDataPoint(dict(point.labels), started_ns or 0, now_ns, point.value)


def _buckets(point: MetricSample, started_ns: int, now_ns: int) -> HistogramDataPoint:
    report = point.value
    assert isinstance(report, HistogramReport)
    not_kept: Any = None  # minimum and maximum are unknown, so their fields are omitted
    return HistogramDataPoint(
        dict(point.labels),
        started_ns,
        now_ns,
        sum(report.counts),
        report.total,
        report.counts,
        report.bounds,
        not_kept,
        not_kept,
    )
