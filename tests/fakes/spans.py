"""Spans kept in memory, to be asked for their parents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource

from kvrelay.telemetry.tracer import TraceContext, Tracer


@dataclass
class RecordedSpan:
    """A span of the SDK in terms of trace contexts. `error` is None on success."""

    name: str
    kind: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    links: list[TraceContext]
    error: str | None


@dataclass
class RecordedSpans:
    """A span processor of the SDK."""

    spans: list[RecordedSpan] = field(default_factory=list)

    def on_end(self, span: Any) -> None:
        self.spans.append(
            RecordedSpan(
                name=span.name,
                kind=span.kind.name.lower(),
                context=_context(span.context),
                parent=_context(span.parent) if span.parent is not None else None,
                start_ns=span.start_time,
                end_ns=span.end_time,
                attributes=span.attributes,
                links=[_context(link.context) for link in span.links],
                error=span.status.description,
            )
        )

    def shutdown(self) -> None:
        pass

    @property
    def tracer(self) -> Tracer:
        return Tracer(self, Resource.create())

    def of(self, trace_id: int, name: str = "") -> list[RecordedSpan]:
        """The spans of a trace, by their beginnings."""
        found = [span for span in self.spans if span.context.trace_id == trace_id and (not name or span.name == name)]
        return sorted(found, key=lambda span: span.start_ns)

    def children(self, parent: RecordedSpan) -> list[str]:
        """The names of a span's children, sorted."""
        return sorted(span.name for span in self.spans if span.parent == parent.context)

    def check_parents(self, trace_id: int, outermost: TraceContext) -> None:
        """Every span of the trace hangs, over others of it, on the outermost one, which was recorded elsewhere."""
        known = {span.context for span in self.of(trace_id)} | {outermost}
        assert len(known) == len(self.of(trace_id)) + 1, "a span id was used twice"
        for span in self.of(trace_id):
            assert span.parent in known, f"{span.name} hangs in the air"
            assert span.start_ns <= span.end_ns


def _context(context: Any) -> TraceContext:
    return TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled)
