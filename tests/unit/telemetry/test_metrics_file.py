"""Whatever a disk takes, a metrics file holds whole lines, in order, and its writer goes on."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.background_writer import write_all
from kvrelay.telemetry import metrics_file
from kvrelay.telemetry.metrics import SECONDS, Histogram
from kvrelay.telemetry.metrics_file import MetricsFile, StepEvent, read_metrics
from tests.fakes.waiting import PATIENCE_S


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
