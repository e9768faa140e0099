"""Counters and histograms of one process, the samples of all metrics that pages and exporters read, and their page for
Prometheus in text format 0.0.4.

Values are recorded per request, handoff or step, never per token or block. Names and units are those of the catalogue.
On the page they follow OpenTelemetry's rules: dots become underscores, the unit and `_total` of counters are added
(https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/). Not thread-safe: use them on the
event loop's thread.
"""

from __future__ import annotations

import math
import re
import resource
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from kvrelay.protocol.messages import HistogramReport
from kvrelay.telemetry.catalogue import METRICS, Metric
from kvrelay.telemetry.pages import Page

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES = tuple(float(4**power) for power in range(6, 18))
"""Bounds from 4 KiB to 16 GiB."""
GIGABYTES_PER_SECOND = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
TOKENS = tuple(float(2**power) for power in range(15))
"""Bounds from 1 to 16,384."""

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


def process_samples(service: str, name: str, model: str) -> MetricSamples:
    """What this process is, CPU time of all its threads, and its resident memory. `name`: a worker's or router's id."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    about = {"service": service, "name": name, "model": model, "version": version("kvrelay")}
    return {
        "kvrelay.build_info": [MetricSample(tuple(about.items()), 1)],
        "process.cpu.time": samples_by("cpu.mode", {"user": usage.ru_utime, "system": usage.ru_stime}),
        "process.memory.usage": single_sample(_resident_bytes()),
    }


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # elsewhere than on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


class Histogram:
    """Counts values by fixed, rising bounds: bucket `i` counts values up to `bounds[i]`, the last one all others.

    A record takes 0.5 us, a sixth of one in prometheus_client.
    """

    def __init__(self, unit: str, bounds: tuple[float, ...]) -> None:
        self.unit = unit
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def report(self) -> HistogramReport:
        """The message form of this histogram."""
        return HistogramReport(unit=self.unit, bounds=list(self.bounds), counts=list(self.counts), total=self.total)


class Instruments:
    """The histograms and counters of a process by name. Use only attributes with few values."""

    def __init__(self) -> None:
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self.counters: dict[str, Tally[str]] = {}
        """Sums by the value of the metric's only attribute."""
        self._labelled: dict[str, Tally[Labels]] = {}

    def histogram(self, name: str, bounds: tuple[float, ...], labels: Labels = ()) -> Histogram:
        """The histogram of these attributes, created on first use."""
        family = self._histograms.setdefault(name, {})
        if (histogram := family.get(labels)) is None:
            histogram = family[labels] = Histogram(METRICS[name].unit, bounds)
        return histogram

    def family(self, name: str, bounds: tuple[float, ...]) -> Callable[[Labels], Histogram]:
        """The histograms of one name, by their attributes."""
        self._histograms.setdefault(name, {})
        return partial(self.histogram, name, bounds)

    def counter(self, name: str) -> Tally[str]:
        """The counter, created on first use."""
        return self.counters.setdefault(name, Tally())

    def labelled_counter(self, name: str) -> Tally[Labels]:
        """The counter of a metric with several attributes, created on first use."""
        return self._labelled.setdefault(name, Tally())

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """The histograms without attributes, by name."""
        return ((name, family[()]) for name, family in sorted(self._histograms.items()) if () in family)

    def samples(self) -> MetricSamples:
        found: MetricSamples = {
            name: [MetricSample(labels, histogram.report()) for labels, histogram in family.items()]
            for name, family in self._histograms.items()
        }
        for name, sums in self.counters.items():
            found[name] = samples_by(METRICS[name].attributes[0], sums)
        for name, tally in self._labelled.items():
            found[name] = [MetricSample(labels, value) for labels, value in tally.items()]
        return found


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
