"""Spans of what is over: written from the moments that were noted on the way, when a request ends.

So nothing is recorded while tokens come, and a span costs a few microseconds on the event loop's thread; a batch
processor's thread encodes and sends it. Where nothing is exported there is no `Tracer`, and nothing is noted either.

The router's spans are the parents of all others: a worker that dies takes its own spans along, and never the parents of
somebody else's.
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
    """What is over. Times are nanoseconds since the epoch; `error` None: it went well."""

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
    """Where spans go: `kvrelay.telemetry.otlp.SdkSpans`, which knows the SDK."""

    def is_sampled(self, context: TraceContext, parent: TraceContext | None, name: str) -> bool:
        """Whether a trace that begins here, or comes in from outside, is recorded."""
        ...

    def put(self, span: Span) -> None:
        """A span is over; never blocks."""
        ...

    def close(self) -> None:
        """Sends what is left; may block for that."""
        ...


class Tracer:
    """Times are seconds of the monotonic clock."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    def begin(self, traceparent: str, name: str) -> tuple[TraceContext, TraceContext | None]:
        """A span for a request from outside, and its parent there, if the request named one."""
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
        """A span is over. Those of traces that are not sampled are dropped."""
        if context.is_sampled:
            to_epoch = time.time() - time.monotonic()
            start_ns, end_ns = int((start + to_epoch) * 1e9), int((max(start, end) + to_epoch) * 1e9)
            self._sink.put(Span(name, context, parent, start_ns, end_ns, kind, attributes or {}, list(links), error))


def sampled(traceparent: str) -> TraceContext | None:
    """The context that a message carries, if its trace is recorded."""
    context = parse_traceparent(traceparent) if traceparent else None
    return context if context is not None and context.is_sampled else None


def trace_fields(traceparent: str) -> dict[str, Any]:
    """For the `extra` of a log line about a request: the ids under which logs and traces are found together."""
    context = parse_traceparent(traceparent)
    if context is None:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
