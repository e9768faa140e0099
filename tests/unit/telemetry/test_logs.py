"""Logs for people and for machines; those that others can cause in any number, and a pipe that nobody reads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Literal

import pytest

from kvrelay.logs import BackgroundHandler, LimitedLog, log_with, setup_logging
from tests.fakes.waiting import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """Gives the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def logged(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was logged since the last call."""
    logging.getLogger().handlers[0].flush()
    return capsys.readouterr().err


def test_text_has_the_fields_of_the_process_and_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "text", worker_id="w-1")
    logging.getLogger("a.b").info("took %d ms", 5, extra={"request_id": "r-1"})
    line = logged(capsys).rstrip("\n")
    assert line.endswith("INFO    a.b: took 5 ms worker_id=w-1 request_id=r-1")
    assert line[10] == "T"
    assert line.split(" ")[0].endswith("Z")


def test_json_is_one_object_a_line_even_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", worker_id="w-1")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("a").exception("über\nall", extra={"request_id": "r-1", "num_tokens": 3, "odd": object})
    (line,) = logged(capsys).splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "a", "über\nall")
    assert (entry["worker_id"], entry["request_id"], entry["num_tokens"]) == ("w-1", "r-1", 3)
    assert "ValueError: two\nlines" in entry["exception"]
    assert set(entry) == {
        "time", "level", "logger", "message", "worker_id", "request_id", "num_tokens", "odd", "exception"
    }  # fmt: skip


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_part_of_a_process_has_fields_of_its_own_and_so_has_what_it_starts(
    capsys: pytest.CaptureFixture[str], log_format: Literal["text", "json"]
) -> None:
    setup_logging("info", log_format, worker_id="process")
    log = logging.getLogger("a")

    async def part(name: str) -> None:
        log_with(worker_id=name)
        asyncio.get_running_loop().call_soon(log.info, "a callback of %s", name)
        await asyncio.create_task(asyncio.sleep(0))
        log.info("%s itself", name)

    async def run() -> None:
        await asyncio.gather(part("one"), part("two"))
        log.info("the process")

    asyncio.run(run())
    lines = logged(capsys).splitlines()
    said = {"a callback of one": "one", "one itself": "one", "two itself": "two", "the process": "process"}
    for words, owner in said.items():
        (line,) = (line for line in lines if words in line)
        assert (f"worker_id={owner}" if log_format == "text" else f'"worker_id": "{owner}"') in line


def test_the_level_holds(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning")
    logging.getLogger("a").info("quiet")
    logging.getLogger("a").warning("loud")
    assert "quiet" not in (text := logged(capsys))
    assert "loud" in text


def test_setting_up_twice_does_not_log_twice(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    setup_logging()
    logging.getLogger("a").info("once")
    assert logged(capsys).count("once") == 1


# -- warnings that others can cause in any number are written now and then, with a count -----------------------------


def test_one_line_of_each_kind_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    limited = LimitedLog(logging.getLogger("limited"), interval_s=5.0, clock=lambda: now)
    for number in range(10):
        limited.warning("one", "message %d", number)
        limited.warning("other", "another %d", number)
    assert caplog.messages == ["message 0", "another 0"]
    now += 5.0
    limited.warning("one", "message %d", 10)
    limited.warning("one", "message %d", 11)
    assert caplog.messages[2:] == ["message 10 (9 more since the last such line)"]
    now += 60.0
    limited.warning("one", "message %d", 12)
    assert caplog.messages[-1] == "message 12 (1 more since the last such line)"
    now += 60.0
    limited.warning("one", "message %d", 13)
    assert caplog.messages[-1] == "message 13"


def test_kinds_beyond_the_limit_take_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(logging.getLogger("limited"))
    for number in range(3 * LimitedLog.MAX_KINDS):
        limited.warning(f"peer {number}", "peer %d is lost", number)
    assert len(limited._lines) <= LimitedLog.MAX_KINDS
    assert len(caplog.messages) == 3 * LimitedLog.MAX_KINDS


# -- log lines go to a pipe that nobody reads, and whoever logs does not wait ----------------------------------------


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
