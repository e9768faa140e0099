"""Log lines go to a pipe that nobody reads, and whoever logs does not wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvrelay.logs import BackgroundHandler
from tests.fakes.waiting import PATIENCE_S, wait_until

PIPE_CHARS = 1 << 16
LINE = "x" * 99


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text})


@pytest.fixture
def pipe() -> Iterator[tuple[int, BackgroundHandler]]:
    """The end to read, and a handler with room for a hundred lines beside what the pipe holds."""
    read_end, write_end = os.pipe()
    stream = os.fdopen(write_end, "w")
    handler = BackgroundHandler(stream, max_waiting_bytes=PIPE_CHARS + 100 * (len(LINE) + 1))
    yield read_end, handler
    os.close(read_end)
    handler.close()
    stream.close()


def test_a_reader_that_stands_still_costs_lines_and_no_time(pipe: tuple[int, BackgroundHandler]) -> None:
    read_end, handler = pipe
    num_lines = 10 * PIPE_CHARS // (len(LINE) + 1)
    for _ in range(num_lines):
        handler.handle(record(LINE))
    assert handler._writer.num_waiting_bytes <= PIPE_CHARS + 100 * (len(LINE) + 1)
    read = bytearray()

    def read_all() -> None:
        while not read.endswith(b"goes on\n"):
            read.extend(os.read(read_end, 1 << 20))

    reader = threading.Thread(target=read_all)
    reader.start()
    wait_until(lambda: handler._writer.num_waiting_bytes == 0)
    handler.handle(record("goes on"))
    reader.join(PATIENCE_S)
    lines = read.decode().splitlines()
    lost = [int(line.split()[0]) for line in lines if "log lines were lost" in line]
    assert sum(lost) > 0
    assert lines.count(LINE) + sum(lost) == num_lines


def test_a_reader_that_is_gone_raises_nothing() -> None:
    read_end, write_end = os.pipe()
    stream = os.fdopen(write_end, "w")
    handler = BackgroundHandler(stream)
    os.close(read_end)
    for _ in range(10):
        handler.handle(record(LINE))
    handler.flush()
    handler.close()
    assert handler._writer.num_waiting_bytes == 0
    stream.close()


PROGRAM = """
import logging
from kvrelay.logs import setup_logging
setup_logging()
for number in range(NUM):
    logging.getLogger("a").info("%s %d", "x" * 100, number)
print("done", flush=True)
"""


def test_a_process_writes_its_last_lines_when_it_ends() -> None:
    program = PROGRAM.replace("NUM", "3000")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stderr.count("\n") == 3000 and ended.stderr.endswith("x 2999\n")


def test_a_process_ends_although_nobody_reads_its_log() -> None:
    program = PROGRAM.replace("NUM", "10000")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(PATIENCE_S) == 0
