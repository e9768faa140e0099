"""Writes spans when a request ends, from times that were noted before.

Nothing is recorded per token. A span costs a few microseconds on the event loop's thread; a batch processor's thread
encodes and sends it. If nothing is exported there is no `Tracer` and nothing is noted.

The router's spans are the parents of all others, so a worker that dies loses only its own spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvrelay.telemetry.trace_context import TraceContext, new_trace, parse_traceparent

SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span. Times are nanoseconds since the epoch; `error` is None on success."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    kind: SpanKind
    attributes: Attributes
    links: list[TraceContext]
    error: str | None


class SpanSink(Protocol):
    """Receives spans. `kvrelay.telemetry.otlp.SdkSpans` implements it with the SDK."""

    def is_sampled(self, context: TraceContext, parent: TraceContext | None, name: str) -> bool:
        """Returns whether a trace that starts here, or arrives from a client, is recorded."""
        ...

    def put(self, span: Span) -> None:
        """Takes a finished span; never blocks."""
        ...

    def close(self) -> None:
        """Sends the remaining spans; may block."""
        ...


class Tracer:
    """Makes spans from times in monotonic seconds."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    def begin(self, traceparent: str, name: str) -> tuple[TraceContext, TraceContext | None]:
        """The context of a client request's span, and its parent if the request named one."""
        parent = parse_traceparent(traceparent)
        context = new_trace(is_sampled=False) if parent is None else parent.child()
        return context._replace(is_sampled=self._sink.is_sampled(context, parent, name)), parent

    def record(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        start: float,
        end: float,
        *,
        kind: SpanKind = "internal",
        attributes: Attributes | None = None,
        links: Iterable[TraceContext] = (),
        error: str | None = None,
    ) -> None:
        """Records a finished span. Spans of unsampled traces are dropped."""
        if context.is_sampled:
            to_epoch = time.time() - time.monotonic()
            start_ns, end_ns = int((start + to_epoch) * 1e9), int((max(start, end) + to_epoch) * 1e9)
            self._sink.put(Span(name, context, parent, start_ns, end_ns, kind, attributes or {}, list(links), error))


def sampled(traceparent: str) -> TraceContext | None:
    """Parses a message's trace context; None if the trace is not recorded."""
    context = parse_traceparent(traceparent) if traceparent else None
    return context if context is not None and context.is_sampled else None


def trace_fields(traceparent: str) -> dict[str, Any]:
    """The trace ids for the `extra` of a log line, which link logs and traces."""
    context = parse_traceparent(traceparent)
    if context is None:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
