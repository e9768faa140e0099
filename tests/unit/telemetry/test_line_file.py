"""Whatever a disk takes, a file of lines holds whole lines, in order, and its writer goes on."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry import line_file
from kvrelay.telemetry.line_file import BackgroundLines, LineFile
from tests.fakes.waiting import PATIENCE_S


class ModelDisk:
    """Takes so many bytes of each call, in turn; None: the disk is full. Afterwards it takes everything."""

    def __init__(self, takes: list[int | None]) -> None:
        self.content = b""
        self.closed = False
        self._takes = takes

    def write(self, data: memoryview) -> int:
        taken = self._takes.pop(0) if self._takes else len(data)
        if taken is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.content += bytes(data[:taken])
        return min(taken, len(data))


writes = st.lists(st.integers(0, 4), max_size=12)  # lines of each write
takes = st.lists(st.none() | st.integers(1, 9), max_size=20)


@given(writes, takes)
def test_a_disk_that_fills_and_empties_holds_whole_lines_and_the_last_write_after_it(
    numbers: list[int], taken: list[int | None]
) -> None:
    with TemporaryDirectory() as directory:
        file = LineFile(Path(directory) / "lines")
    disk = ModelDisk(taken)
    file._file.close()
    file._file = disk  # type: ignore[assignment]
    written: list[bytes] = []
    for number in numbers:
        lines = [b"line %d\n" % (len(written) + each) for each in range(number)]
        written += lines
        file.write(b"".join(lines))
    while disk._takes:  # until the disk has room again
        file.write(b"")
        disk._takes = disk._takes[1:]
    file.write(b"last\n")
    found = disk.content.splitlines(keepends=True)
    assert found.pop() == b"last\n"
    places = [written.index(line) for line in found]
    assert places == sorted(set(places))  # whole lines, in order, none twice
    assert sum(map(len, written)) == sum(map(len, found)) + file.num_lost_bytes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_told_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        file.write(b"one\n")
        file.write(b"two\n")
    file.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert file.num_lost_bytes == 8


@given(st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line), max_size=5), st.binary(max_size=5))
def test_a_line_that_a_crash_cut_off_is_removed_at_the_next_start(lines: list[bytes], cut: bytes) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "lines"
        path.write_bytes(whole + cut.replace(b"\n", b""))
        file = LineFile(path)
        file.write(b"new\n")
        file.close()
        assert path.read_bytes() == whole + b"new\n"


def test_a_disk_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for it is bounded; what is written is whole lines in their order."""
    moves, at_it = threading.Event(), threading.Event()
    write = LineFile.write

    def slow_write(file: LineFile, lines: bytes) -> None:
        at_it.set()
        assert moves.wait(PATIENCE_S)
        write(file, lines)

    monkeypatch.setattr(LineFile, "write", slow_write)
    lines = BackgroundLines(tmp_path / "lines", max_waiting_bytes=12)
    lines.write(b"first\n")
    assert at_it.wait(PATIENCE_S)
    for line in (b"second\n", b"third and too much\n", b"4th\n", b"fifth\n"):
        lines.write(line)
    moves.set()
    lines.close()
    lines.close()
    assert (tmp_path / "lines").read_bytes() == b"first\nsecond\n4th\n"
    assert len(caplog.records) == 1
    assert "some are lost" in caplog.text


def test_a_pipe_that_stands_still_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_file, "CLOSE_TIMEOUT_S", 0.05)
    os.mkfifo(tmp_path / "lines")
    reader = os.open(tmp_path / "lines", os.O_RDONLY | os.O_NONBLOCK)
    lines = BackgroundLines(tmp_path / "lines")
    lines.write(b"x" * (1 << 20) + b"\n")  # more than a pipe takes
    lines.close()
    assert "its last lines are lost" in caplog.text
    assert lines._thread.daemon  # the interpreter does not wait for it either
    os.close(reader)  # ends the write
    lines._thread.join(PATIENCE_S)


def test_a_pipe_without_a_reader_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(OSError, match="has no reader"):
        BackgroundLines(tmp_path / "lines")


def test_lines_from_a_thread_are_all_there(tmp_path: Path) -> None:
    lines, written = BackgroundLines(tmp_path / "lines"), [b"%d\n" % index for index in range(2000)]
    for line in written:
        lines.write(line)
    lines.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(written)
