"""Numbers that leave the process: the page of metrics, and files of them, whatever labels hold and a disk takes."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.background_writer import write_all
from kvrelay.telemetry import metrics_file
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
from kvrelay.telemetry.metrics_file import MetricsFile, StepEvent, read_metrics
from tests.fakes.waiting import PATIENCE_S

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


# -- whatever a disk takes, a metrics file holds whole lines, in order, and its writer goes on -----------------------


def event(number: int) -> StepEvent:
    return StepEvent(number, 0.0, number, "planned")


def numbers_in(path: Path) -> list[int]:
    return [each.order for each in read_metrics(path) if isinstance(each, StepEvent)]


class FailingDisk(FileIO):
    """Takes so many bytes of each call, in turn; None: the disk is full. Afterwards it takes everything."""

    takes: list[int | None]

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        taken = self.takes.pop(0) if self.takes else len(data)
        if taken is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:taken])


@given(st.lists(st.none() | st.integers(1, 9), max_size=20))
def test_a_disk_that_fills_and_empties_holds_whole_lines_in_order(takes: list[int | None]) -> None:
    with TemporaryDirectory() as directory:
        file = MetricsFile(Path(directory) / "lines")
        file._file.close()
        file._file = disk = FailingDisk(file._path, "ab")
        disk.takes = list(takes)
        number = 0
        while disk.takes:
            number += 1
            file._write_lines([file._encoder.encode(event(number)) + b"\n"])
        file._write_lines([file._encoder.encode(event(number + 1)) + b"\n"])
        file.close()
        found = numbers_in(file._path)
        assert found == sorted(set(found)) and found[-1] == number + 1
        assert None in takes or found == list(range(1, number + 2))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_reported_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_file, "FLUSH_INTERVAL_S", 0.0)
    file = MetricsFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        file.write(event(1))
        file.write(event(2))
        file.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


@given(st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line), max_size=5), st.binary(max_size=5))
def test_a_line_that_a_crash_cut_off_is_removed_at_the_next_start(lines: list[bytes], cut: bytes) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "lines"
        path.write_bytes(whole + cut.replace(b"\n", b""))
        file = MetricsFile(path)
        file.close()
        assert path.read_bytes() == whole


def test_a_disk_that_stands_still_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for it is bounded; what is written is whole lines in their order."""
    moves, at_it = threading.Event(), threading.Event()

    def slow_write(file: FileIO, data: bytes) -> None:
        at_it.set()
        assert moves.wait(PATIENCE_S)
        write_all(file, data)

    monkeypatch.setattr(metrics_file, "write_all", slow_write)
    monkeypatch.setattr(metrics_file, "FLUSH_INTERVAL_S", 0.0)
    file = MetricsFile(tmp_path / "lines")
    file.write(event(1))
    assert at_it.wait(PATIENCE_S)
    file._writer.max_waiting_bytes = 2 * len(file._encoder.encode(event(1)) + b"\n")
    for number in (2, 3, 4):
        file.write(event(number))
    moves.set()
    file.close()
    file.close()
    assert numbers_in(tmp_path / "lines") == [1, 2]
    assert len(caplog.records) == 1
    assert "some are lost" in caplog.text


def test_a_pipe_that_stands_still_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_file, "CLOSE_TIMEOUT_S", 0.05)
    os.mkfifo(tmp_path / "lines")
    reader = os.open(tmp_path / "lines", os.O_RDONLY | os.O_NONBLOCK)
    file = MetricsFile(tmp_path / "lines")
    file._writer.put(b"x" * (1 << 20))  # more than a pipe takes
    file.close()
    assert "its last lines are lost" in caplog.text
    assert file._writer._thread.daemon  # the interpreter does not wait for it either
    os.close(reader)  # ends the write
    file._writer._thread.join(PATIENCE_S)


def test_a_pipe_without_a_reader_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(OSError, match="has no reader"):
        MetricsFile(tmp_path / "lines")


def test_all_lines_are_there_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "FLUSH_INTERVAL_S", 0.0)
    file = MetricsFile(tmp_path / "lines")
    for number in range(2000):
        file.write(event(number))
    file.close()
    assert numbers_in(tmp_path / "lines") == list(range(2000))


# -- histograms and counters, and what travels of them ---------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(SECONDS))))
def test_every_value_is_counted_once_in_the_bucket_whose_bound_it_does_not_pass(values: list[float]) -> None:
    histogram = Histogram("s", SECONDS)
    for value in values:
        histogram.record(value)
    report = histogram.report()
    edges = [float("-inf"), *report.bounds, float("inf")]
    oracle = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]
    assert report.counts == oracle
    assert report.total == pytest.approx(sum(values))
