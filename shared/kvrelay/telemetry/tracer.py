"""Trace contexts (`traceparent`, https://www.w3.org/TR/trace-context/), spans by OpenTelemetry's SDK, and the events of
recent sequences for `/requests/{id}/timeline`.

Spans and events are written when a request ends, from times that were noted before. Nothing is recorded per token. A
span costs a few microseconds on the event loop's thread; a batch processor's thread encodes and sends it. If nothing is
exported there is no `Tracer`.

The router's spans are the parents of all others, so a worker that dies loses only its own spans.
"""

from __future__ import annotations

import random
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from kvrelay.protocol.messages import TimelineEvent
from kvrelay.protocol.sequence_key import SequenceKey

SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float | tuple[str, ...]]

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
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
        return self._replace(span_id=_random.getrandbits(64) or 1)


def parse_traceparent(text: str) -> TraceContext | None:
    """Parses a `traceparent`; None if it is invalid. Later versions are read as version 00."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or (match[1] == "00" and match[5]):
        return None
    return TraceContext(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED))


def new_trace(*, is_sampled: bool) -> TraceContext:
    """The context of the first span of a new trace."""
    return TraceContext(_random.getrandbits(128) or 1, _random.getrandbits(64) or 1, is_sampled)


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


class Tracer:
    """Makes spans from times in monotonic seconds, for a span processor of the SDK."""

    def __init__(self, processor: Any, resource: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api = trace
        self._make_span = ReadableSpan
        self._resource = resource
        self._processor = processor
        self._scope = InstrumentationScope("kvrelay", version("kvrelay"))
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler  # reads OTEL_TRACES_SAMPLER

    def begin(self, traceparent: str, name: str) -> tuple[TraceContext, TraceContext | None]:
        """The context of a client request's span, and its parent if the request named one."""
        parent, surroundings = parse_traceparent(traceparent), None
        if parent is not None:
            span = self._api.NonRecordingSpan(self._context(parent, is_remote=True))
            surroundings = self._api.set_span_in_context(span)
        context = new_trace(is_sampled=False) if parent is None else parent.child()
        result = self._sampler.should_sample(surroundings, context.trace_id, name, self._api.SpanKind.SERVER)
        return context._replace(is_sampled=result.decision.name == "RECORD_AND_SAMPLE"), parent

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
        """Records a finished span; `error` is None on success. Never blocks. Spans of unsampled traces are dropped."""
        if not context.is_sampled:
            return
        api = self._api
        to_epoch = time.time() - time.monotonic()
        self._processor.on_end(
            self._make_span(
                name,
                self._context(context),
                parent=self._context(parent, is_remote=True) if parent is not None else None,
                resource=self._resource,
                attributes=attributes,
                links=[api.Link(self._context(link)) for link in links],
                kind=api.SpanKind[kind.upper()],
                instrumentation_scope=self._scope,
                status=api.Status() if error is None else api.Status(api.StatusCode.ERROR, error),
                start_time=int((start + to_epoch) * 1e9),
                end_time=int((max(start, end) + to_epoch) * 1e9),
            )
        )

    def close(self) -> None:
        """Sends the remaining spans; blocks."""
        self._processor.shutdown()

    def _context(self, context: TraceContext, *, is_remote: bool = False) -> Any:
        flags = self._api.TraceFlags(int(context.is_sampled))
        return self._api.SpanContext(context.trace_id, context.span_id, is_remote, flags)


MAX_REQUESTS = 512
MAX_EVENTS = 512
"""Maximum events of one request; events of further samples and attempts are dropped."""


class RecentEvents:
    """Events of the latest `max_requests` requests that left this worker."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, list[TimelineEvent]] = OrderedDict()

    def add(self, key: SequenceKey, events: Iterable[TimelineEvent]) -> None:
        """Adds events; beyond `max_requests`, drops the least recently extended request."""
        known = self._requests.setdefault(key[0], [])
        known += list(events)[: max(0, MAX_EVENTS - len(known))]
        self._requests.move_to_end(key[0])
        while len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)

    def of(self, request: str) -> list[TimelineEvent]:
        """Events of one request; empty if it is unknown or dropped."""
        return list(self._requests.get(request, ()))


def timeline_event(
    key: SequenceKey, name: str, start: float, end: float | None, detail: dict[str, float | str] | None = None
) -> TimelineEvent:
    """Makes an event from monotonic seconds. `end` is None while the event lasts."""
    to_epoch = time.time() - time.monotonic()
    return TimelineEvent(
        attempt=key[1],
        sequence=key[2],
        name=name,
        start=start + to_epoch,
        end=end + to_epoch if end is not None else None,
        detail=detail or {},
    )
