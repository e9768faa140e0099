"""W3C trace context (https://www.w3.org/TR/trace-context/, `traceparent`): where in which trace something happens."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

_PATTERN = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_random = random.Random()  # seeded by the system; ids are names, not secrets


class TraceContext(NamedTuple):
    """A span: its trace, its own id, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool

    def __str__(self) -> str:
        """The `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """None for what is no valid `traceparent`. Of later versions the fields of version 00 are read."""
    match = _PATTERN.fullmatch(text)
    if match is None or (match[1] == "00" and match[5]):
        return None
    return TraceContext(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED))


def new_trace(*, is_sampled: bool) -> TraceContext:
    """The first span of a new trace."""
    return TraceContext(_random.getrandbits(128) or 1, new_span_id(), is_sampled)


def new_span_id() -> int:
    """64 random bits, not all of them 0."""
    return _random.getrandbits(64) or 1
