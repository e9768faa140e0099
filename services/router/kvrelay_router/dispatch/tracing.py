"""The attempts of a request as spans, `kvrelay.attempt`: children of the request's span, parents of the workers' spans.

They are written from the request's record when the request is over.
"""

from __future__ import annotations

from kvrelay.telemetry.tracer import Attributes, Tracer, parse_traceparent
from kvrelay_router.dispatch.records import AttemptRecord, RequestRecord


class AttemptTracing:
    """Records one span per attempt."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, request_trace: str) -> str:
        """Returns the trace context for an attempt's messages. An invalid request context is returned unchanged."""
        context = parse_traceparent(request_trace)
        return str(context.child()) if context is not None else request_trace

    def ended(self, record: RequestRecord, request_trace: str) -> None:
        parent = parse_traceparent(request_trace)
        if parent is None or not parent.is_sampled:
            return
        for index, sequence in enumerate(record.sequences):
            for attempt in sequence.attempts:
                context = parse_traceparent(attempt.trace)
                if context is None:
                    continue
                ended_ms = attempt.ended_ms if attempt.ended_ms is not None else record.elapsed_ms()
                self._tracer.record(
                    "kvrelay.attempt",
                    context,
                    parent,
                    record.submitted + attempt.placed_ms / 1000,
                    record.submitted + ended_ms / 1000,
                    kind="client",
                    attributes=_attributes(record, index, attempt),
                    error=attempt.failure or None,
                )


def _attributes(record: RequestRecord, sequence: int, attempt: AttemptRecord) -> Attributes:
    attributes: dict[str, str | int | tuple[str, ...]] = {
        "kvrelay.request": record.request_id,
        "kvrelay.attempt": attempt.attempt,
        "kvrelay.sequence": sequence,
        "kvrelay.route.policy": attempt.policy,
        "kvrelay.route.reasons": attempt.reasons,
        "kvrelay.outcome": record.state,
        "kvrelay.reassigned": len(attempt.reassigned),
    }
    if attempt.prefill is not None:
        attributes["kvrelay.worker.prefill"] = attempt.prefill
    if attempt.decode is not None:
        attributes["kvrelay.worker.decode"] = attempt.decode
    if attempt.cause:
        attributes["kvrelay.retry.cause"] = attempt.cause
    return attributes
