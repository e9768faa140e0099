"""Renders metric samples as a Prometheus page in text format 0.0.4.

Names follow OpenTelemetry's rules for Prometheus: dots become underscores, the unit and `_total` of counters are added.
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate

from kvrelay.protocol.messages import HistogramReport
from kvrelay.telemetry.catalogue import METRICS, Metric
from kvrelay.telemetry.metrics import Labels, MetricSamples
from kvrelay.telemetry.pages import Page

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNITS = {"s": "seconds", "By": "bytes", "GBy/s": "gigabytes_per_second"}
_SUFFIX = {"counter": "_total", "gauge": "", "histogram": ""}


def prometheus_name(metric: Metric) -> str:
    """The Prometheus name, without the suffixes of histogram samples."""
    name = metric.name.replace(".", "_")
    unit = _UNITS.get(metric.unit, "")
    if unit and not name.endswith(f"_{unit}"):
        name = f"{name}_{unit}"
    return name + _SUFFIX[metric.kind]


def metrics_page(samples: MetricSamples) -> Page:
    """Renders the page. Raises KeyError for a metric that is not in the catalogue."""
    lines: list[str] = []
    for name in sorted(samples):
        metric = METRICS[name]
        title = prometheus_name(metric)
        lines += [f"# HELP {title} {_escaped_help(metric.text)}", f"# TYPE {title} {metric.kind}"]
        for labels, value in samples[name]:
            if isinstance(value, HistogramReport):
                lines += _histogram(title, labels, value)
            else:
                lines.append(f"{title}{_labels(labels)} {_number(value)}")
    return Page("".join(f"{line}\n" for line in lines).encode(), content_type=CONTENT_TYPE)


def _histogram(title: str, labels: Labels, report: HistogramReport) -> Iterable[str]:
    counts = list(accumulate(report.counts))
    for bound, count in zip([*report.bounds, math.inf], counts, strict=True):
        yield f"{title}_bucket{_labels((*labels, ('le', _number(bound))))} {count}"
    yield f"{title}_sum{_labels(labels)} {_number(report.total)}"
    yield f"{title}_count{_labels(labels)} {counts[-1]}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{_label_name(name)}="{_escaped(value)}"' for name, value in labels) + "}"


def _label_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
