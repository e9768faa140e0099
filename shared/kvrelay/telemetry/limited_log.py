"""Limits log lines that any client of a socket could otherwise cause without bound."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_S = 5.0


@dataclass(slots=True)
class _Line:
    next_at: float
    num_left_out: int = 0


class LimitedLog:
    """Logs at most one warning of each kind every `interval_s`. The next one says how many were left out."""

    def __init__(
        self, log: logging.Logger, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def warning(self, kind: str, text: str, *args: object) -> None:
        """Logs `text % args`. Use a fixed set of kinds: each is remembered."""
        now = self._clock()
        line = self._lines.setdefault(kind, _Line(now))
        if now < line.next_at:
            line.num_left_out += 1
            return
        more = f" ({line.num_left_out} more since the last such line)" if line.num_left_out else ""
        self._log.warning(text + "%s", *args, more)
        self._lines[kind] = _Line(now + self._interval_s)
