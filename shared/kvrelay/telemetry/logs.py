"""Logging to standard error as text, or as one JSON object per line. Both show `extra` (`request_id`, `worker_id`,
...).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from kvrelay.telemetry.background_log import BackgroundHandler

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


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
    """Formats `time level logger: message name=value ...`, with the traceback below."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, and more for a traceback."""
        fields = {**self._fields, **_fields_of_task.get(), **extra_fields(record)}
        suffix = "".join(f" {name}={value}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}{suffix}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats an object with time (UTC), level, logger, message, extra fields, and the traceback as `exception`."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Returns exactly one line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_fields_of_task.get(),
            **extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)
