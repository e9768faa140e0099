"""The part of a failed service's log that says why it failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_LINES = 30
MAX_COLUMNS = 300
MAX_ERROR_COLUMNS = 1000
"""The line of the error is cut later than others, because advice stands at its end."""
_ERROR = re.compile(
    r" (ERROR|CRITICAL) |\"level\": ?\"(error|critical)\"|^[A-Za-z_.]*(Error|Exception)\b.*:|cannot start"
)
_CONFIGURATION = re.compile(r"\bconfiguration: ")


def log_excerpt(lines: Sequence[str]) -> list[str]:
    """The last error first, then the last lines. Without the line of the configuration; long lines are cut."""
    last = [line for line in lines if not _CONFIGURATION.search(line)][-MAX_LINES:]
    error = next((number for number in range(len(last) - 1, -1, -1) if _ERROR.search(last[number])), None)
    if error is None:
        return [_cut(line) for line in last]
    before = [_cut(line) for number, line in enumerate(last) if number != error]
    return [_cut(last[error], MAX_ERROR_COLUMNS), *(["(the last lines of the log)", *before] if before else [])]


def _cut(line: str, columns: int = MAX_COLUMNS) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"
