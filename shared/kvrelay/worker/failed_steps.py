"""The log line of a step that failed."""

from __future__ import annotations

import logging

from kvrelay.step.batch import RowsFailed

log = logging.getLogger(__name__)

MAX_NAMED = 8
"""Requests that a line names."""


def log_failed_step(step: int, error: Exception) -> None:
    """Logs the error of a step. It has no traceback, and is no error, if requests caused it that would fail in the same
    way on any other worker: their clients get 400, and the step runs again without them."""
    if not isinstance(error, RowsFailed) or not error.kind.recurs:
        log.error("step %d failed", step, exc_info=error)
        return
    names = sorted({request_id for request_id, _, _ in error.keys})
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    log.info("step %d cannot go on with %s%s: %s", step, ", ".join(names[:MAX_NAMED]), more, error)
