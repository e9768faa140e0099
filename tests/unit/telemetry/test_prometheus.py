"""The page: valid names, and values that come back as they were, whatever the labels hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry.catalogue import METRICS, Metric
from kvrelay.telemetry.metrics import (
    SECONDS,
    Histogram,
    Instruments,
    MetricSample,
    MetricSamples,
    merged,
    metrics_page,
    prometheus_name,
    samples_by,
    single_sample,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """An own, slow reading of the text format, character by character."""
    found: Samples = {}
    for line in text.split("\n")[:-1]:
        if line.startswith("#"):
            continue
        characters = iter(line)
        name = ""
        labels: list[tuple[str, str]] = []
        for character in characters:
            if character == "{":
                labels = list(read_labels(characters))
                assert next(characters) == " "
                break
            if character == " ":
                break
            name += character
        key = name, tuple(labels)
        assert key not in found, f"twice: {key}"
        found[key] = float("".join(characters))
    return found


def read_labels(characters: Iterator[str]) -> Iterator[tuple[str, str]]:
    name = ""
    for character in characters:
        if character == "}":
            return
        if character == "=":
            assert next(characters) == '"'
            value = ""
            for inner in characters:
                if inner == "\\":
                    escaped = next(characters)
                    value += {"n": "\n"}.get(escaped, escaped)
                elif inner == '"':
                    break
                else:
                    value += inner
            yield name, value
            name = ""
        elif character != ",":
            name += character


def test_names_are_valid_and_distinct() -> None:
    names = [prometheus_name(metric) for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in names)
    ends = {f"{name}{end}" for name in names for end in ("_bucket", "_sum", "_count")}
    assert not ends & set(names), "a metric is named as another one's samples"
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z_]*(\.[a-z][a-z_]*)+", metric.name)
        assert prometheus_name(metric).endswith("_total") == (metric.kind == "counter")
        assert metric.services and metric.text and not metric.text.endswith(".")


def test_units_are_part_of_the_names() -> None:
    def name(of: str, unit: str, kind: str) -> str:
        return prometheus_name(Metric(of, kind, unit, ("router",), "x"))  # type: ignore[arg-type]

    assert name("a.b", "s", "histogram") == "a_b_seconds"
    assert name("a.io", "By", "counter") == "a_io_bytes_total"
    assert name("a.b", "{block}", "gauge") == "a_b"
    assert name("a.rate", "GBy/s", "histogram") == "a_rate_gigabytes_per_second"


@given(st.dictionaries(st.text(), st.floats(allow_nan=False), min_size=1))
def test_labels_and_values_come_back(values: dict[str, float]) -> None:
    text = metrics_page({"kvrelay.blocks": samples_by("state", values)}).body.decode("utf-8", "surrogatepass")
    assert parsed(text) == {("kvrelay_blocks", (("state", owner),)): value for owner, value in values.items()}


@given(st.lists(st.floats(0, 100)))
def test_buckets_add_up(values: list[float]) -> None:
    histogram = Histogram("s", SECONDS)
    for value in values:
        histogram.record(value)
    samples = parsed(metrics_page({"kvrelay.step.duration": [MetricSample((), histogram.report())]}).body.decode())
    for bound in (*SECONDS, math.inf):
        (count,) = [n for (name, labels), n in samples.items() if labels and float(labels[0][1]) == bound]
        assert count == sum(value <= bound for value in values)
    assert samples["kvrelay_step_duration_seconds_count", ()] == len(values)
    assert samples["kvrelay_step_duration_seconds_sum", ()] == pytest.approx(sum(values))


def test_a_metric_that_is_in_no_catalogue_is_an_error() -> None:
    with pytest.raises(KeyError):
        metrics_page({"kvrelay.unheard.of": single_sample(1)})


def test_the_readings_of_instruments_are_all_of_them() -> None:
    instruments = Instruments()
    instruments.histogram("kvrelay.handoff.duration", SECONDS).record(0.3)
    instruments.histogram("gen_ai.server.request.duration", SECONDS, (("error.type", "500"),)).record(1)
    instruments.histogram("gen_ai.server.request.duration", SECONDS).record(2)
    instruments.histogram("gen_ai.server.request.duration", SECONDS).record(3)
    instruments.counter("kvrelay.handoff.failures")["refused"] += 2
    samples = parsed(metrics_page(merged([instruments.samples(), {}])).body.decode())
    assert samples["gen_ai_server_request_duration_seconds_sum", ()] == 5
    assert samples["gen_ai_server_request_duration_seconds_count", (("error_type", "500"),)] == 1
    assert samples["kvrelay_handoff_failures_total", (("cause", "refused"),)] == 2
    assert samples["kvrelay_handoff_duration_seconds_count", ()] == 1


def test_merging_keeps_the_points_of_all() -> None:
    parts: list[MetricSamples] = [{"a": single_sample(1)}, {"a": single_sample(2), "b": single_sample(3)}]
    assert merged(parts) == {"a": [MetricSample((), 1), MetricSample((), 2)], "b": [MetricSample((), 3)]}
    assert parts == [{"a": single_sample(1)}, {"a": single_sample(2), "b": single_sample(3)}]
