"""Logs on standard error: text for people, or one JSON object a line for machines.

What is passed as `extra` (`request_id`, `worker_id`, ...) shows in both.
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

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def setup_logging(level: str = "info", log_format: Literal["text", "json"] = "text", **fields: str) -> None:
    """Sends all of this process's logs to standard error. `fields`, such as `worker_id`, go with every record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else TextFormatter(fields))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


_fields_of_task: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))


def log_with(**fields: str) -> None:
    """From now on these go with every record of this task and of what it starts, in place of the process's."""
    _fields_of_task.set(fields)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _BUILT_IN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`time level logger: message name=value ...`, the traceback below it."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """One line, and more where there is a traceback."""
        fields = {**self._fields, **_fields_of_task.get(), **extra_fields(record)}
        suffix = "".join(f" {name}={value}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}{suffix}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """An object with time (UTC), level, logger, message, the extra fields, and the traceback as `exception`."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Exactly one line."""
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
