"""Spans kept in memory, to be asked for their parents."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.telemetry.trace_context import TraceContext
from kvrelay.telemetry.tracer import Span


@dataclass
class RecordedSpans:
    """A `SpanSink`. Traces that come in from outside are recorded as they say, others as `records_new` says."""

    records_new: bool = True
    spans: list[Span] = field(default_factory=list)

    def is_sampled(self, context: TraceContext, parent: TraceContext | None, name: str) -> bool:
        return parent.is_sampled if parent is not None else self.records_new

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass

    def of(self, trace_id: int, name: str = "") -> list[Span]:
        """The spans of a trace, by their beginnings."""
        found = [span for span in self.spans if span.context.trace_id == trace_id and (not name or span.name == name)]
        return sorted(found, key=lambda span: span.start_ns)

    def children(self, parent: Span) -> list[str]:
        """The names of a span's children, sorted."""
        return sorted(span.name for span in self.spans if span.parent == parent.context)

    def check_parents(self, trace_id: int, outermost: TraceContext) -> None:
        """Every span of the trace hangs, over others of it, on the outermost one, which was recorded elsewhere."""
        known = {span.context for span in self.of(trace_id)} | {outermost}
        assert len(known) == len(self.of(trace_id)) + 1, "a span id was used twice"
        for span in self.of(trace_id):
            assert span.parent in known, f"{span.name} hangs in the air"
            assert span.start_ns <= span.end_ns
