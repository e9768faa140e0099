"""Counters and histograms of one process, which exporters may read at any time.

Values are recorded per request, handoff or step, never per token or block. Names and units follow OpenTelemetry, so an
exporter translates nothing. Not thread-safe: use them on the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator

from kvrelay.protocol.messages import HistogramReport
from kvrelay.telemetry.metric_samples import Labels, MetricSample, MetricSamples, samples_by

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES = tuple(float(4**power) for power in range(6, 18))
"""Bounds from 4 KiB to 16 GiB."""
GIGABYTES_PER_SECOND = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
TOKENS = tuple(float(2**power) for power in range(15))
"""Bounds from 1 to 16,384."""


class Histogram:
    """Counts values by fixed bounds: bucket `i` counts values up to `bounds[i]`, the last one all larger values."""

    def __init__(self, unit: str, bounds: tuple[float, ...]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds rise")
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


class HistogramFamily:
    """Histograms of one name by attributes. Use only attributes with few values."""

    def __init__(self, unit: str, bounds: tuple[float, ...]) -> None:
        self.unit = unit
        self.bounds = bounds
        self.members: dict[Labels, Histogram] = {}

    def of(self, labels: Labels) -> Histogram:
        """The histogram of these attributes, created on first use."""
        histogram = self.members.get(labels)
        if histogram is None:
            histogram = self.members[labels] = Histogram(self.unit, self.bounds)
        return histogram


class Counter:
    """Sums by one attribute with few values (causes, transports)."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self.sums: Tally[str] = Tally()

    def add(self, value: str, amount: int = 1) -> None:
        self.sums[value] += amount


class Instruments:
    """The instruments of a process by name."""

    def __init__(self) -> None:
        self._histograms: dict[str, Histogram] = {}
        self._families: dict[str, HistogramFamily] = {}
        self._counters: dict[str, Counter] = {}

    def histogram(self, name: str, unit: str, bounds: tuple[float, ...]) -> Histogram:
        """Creates an instrument. Raises ValueError if the name exists."""
        self._claim(name)
        self._histograms[name] = made = Histogram(unit, bounds)
        return made

    def histogram_family(self, name: str, unit: str, bounds: tuple[float, ...]) -> HistogramFamily:
        """Creates an instrument. Raises ValueError if the name exists."""
        self._claim(name)
        self._families[name] = made = HistogramFamily(unit, bounds)
        return made

    def counter(self, name: str, attribute: str) -> Counter:
        """Creates an instrument. Raises ValueError if the name exists."""
        self._claim(name)
        self._counters[name] = made = Counter(attribute)
        return made

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        return iter(sorted(self._histograms.items()))

    def counters(self) -> Iterator[tuple[str, Counter]]:
        return iter(sorted(self._counters.items()))

    def samples(self) -> MetricSamples:
        found: MetricSamples = {name: [MetricSample((), each.report())] for name, each in self._histograms.items()}
        for name, family in self._families.items():
            found[name] = [MetricSample(labels, each.report()) for labels, each in family.members.items()]
        for name, counter in self._counters.items():
            found[name] = samples_by(counter.attribute, counter.sums)
        return found

    def _claim(self, name: str) -> None:
        if name in self._histograms or name in self._families or name in self._counters:
            raise ValueError(f"there is an instrument {name} already")
