"""Logs for people and for machines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from kvrelay.logs import log_with, setup_logging


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
