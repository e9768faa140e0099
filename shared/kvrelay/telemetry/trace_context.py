"""W3C trace context (`traceparent`, https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

_PATTERN = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_random = random.Random()  # seeded by the system; ids need not be secret


class TraceContext(NamedTuple):
    """Identifies a span: trace id, span id, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool

    def __str__(self) -> str:
        """The `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def child(self) -> TraceContext:
        """The context of a new span in the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """Parses a `traceparent`; None if it is invalid. Later versions are read as version 00."""
    match = _PATTERN.fullmatch(text)
    if match is None or (match[1] == "00" and match[5]):
        return None
    return TraceContext(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED))


def new_trace(*, is_sampled: bool) -> TraceContext:
    """The context of the first span of a new trace."""
    return TraceContext(_random.getrandbits(128) or 1, new_span_id(), is_sampled)


def new_span_id() -> int:
    """A random 64-bit id, never 0."""
    return _random.getrandbits(64) or 1
