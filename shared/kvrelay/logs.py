"""Logging to standard error as text, or as one JSON object per line. Both show `extra` (`request_id`, `worker_id`,
...). A thread writes the lines, so a terminal or pipe that takes none delays nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

from kvrelay.background_writer import BackgroundWriter

MAX_WAITING_BYTES = 4 << 20
"""Bytes kept in memory while nothing can be written. Further lines are counted and dropped."""
FLUSH_TIMEOUT_S = 2.0
"""Maximum wait for the last lines when the process ends."""
LIMIT_INTERVAL_S = 5.0
_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class BackgroundHandler(logging.Handler):
    """Writes to a text stream, or to its file descriptor if it has one. `flush` and `close` wait until all lines are
    written, but not for ever."""

    def __init__(self, stream: TextIO, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._writer = BackgroundWriter(_writer_of(stream), max_waiting_bytes, "log")
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Returns at once. `handle` calls it under the handler's lock."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        if self._num_lost:
            line = f"{self._num_lost} log lines were lost: they could not be written in time\n{line}"
        is_put = self._writer.put(line.encode(errors="backslashreplace"))
        self._num_lost = 0 if is_put else self._num_lost + 1

    def flush(self) -> None:
        """Waits until all lines are written, `FLUSH_TIMEOUT_S` at most."""
        self._writer.flush(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Ends the thread once all lines are written. Idempotent."""
        self._writer.close(FLUSH_TIMEOUT_S)
        super().close()


def _writer_of(stream: TextIO) -> Callable[[list[bytes]], None]:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # the stream is in memory

        def write(lines: list[bytes]) -> None:
            with suppress(ValueError):  # it is closed
                stream.write(b"".join(lines).decode())
                stream.flush()
    else:
        # A thread that waits in `stream.write` would keep the stream's lock, which the interpreter takes at its end.
        def write(lines: list[bytes]) -> None:
            data = b"".join(lines)
            with suppress(OSError):  # the reader is gone
                while data:
                    data = data[os.write(descriptor, data) :]

    return write


def setup_logging(level: str = "info", log_format: Literal["text", "json"] = "text", **fields: str) -> None:
    """Logs to standard error, on a thread. Every record gets `fields`, such as `worker_id`."""
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else TextFormatter(fields))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, BackgroundHandler):
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


_fields_of_task: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))


def log_with(**fields: str) -> None:
    """Replaces the process's fields for all records of this task and of tasks it starts."""
    _fields_of_task.set(fields)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _BUILT_IN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """Formats `time level logger: message name=value ...`, with the traceback below. `fields` are the process's."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of the process, or of the task, and of the record."""
        return {**self._fields, **_fields_of_task.get(), **extra_fields(record)}

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, and more for a traceback."""
        suffix = "".join(f" {name}={value}" for name, value in self.fields_of(record).items())
        line = f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}{suffix}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(TextFormatter):
    """Formats an object with time (UTC), level, logger, message, extra fields, and the traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns exactly one line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


@dataclass(slots=True)
class _LimitedLine:
    next_at: float
    num_left_out: int = 0


class LimitedLog:
    """Logs at most one warning of each kind every `interval_s`, because any client of a socket could otherwise cause
    lines without bound. The next one says how many were left out, unless there were `MAX_KINDS` of them meanwhile."""

    MAX_KINDS = 1024

    def __init__(
        self, log: logging.Logger, interval_s: float = LIMIT_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._lines: dict[str, _LimitedLine] = {}

    def warning(self, kind: str, text: str, *args: object) -> None:
        """Logs `text % args`."""
        now = self._clock()
        if len(self._lines) >= self.MAX_KINDS:
            self._lines.clear()
        line = self._lines.setdefault(kind, _LimitedLine(now))
        if now < line.next_at:
            line.num_left_out += 1
            return
        more = f" ({line.num_left_out} more since the last such line)" if line.num_left_out else ""
        self._log.warning(text + "%s", *args, more)
        self._lines[kind] = _LimitedLine(now + self._interval_s)
