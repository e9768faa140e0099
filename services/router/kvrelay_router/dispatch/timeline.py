"""The timeline of a request, and latency percentiles, for the dashboard and `kvrelay top`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvrelay.protocol.messages import Stage
from kvrelay_router.dispatch.records import RequestRecord, SequenceHistory

PERCENTILES = (50, 90, 99)


def timeline_of(record: RequestRecord, stages: Mapping[str, list[Stage]]) -> dict[str, Any]:
    """JSON-ready. `stages` are the workers' own records.

    Times are milliseconds since the request was submitted. Times of workers come from the clocks of their machines.
    """
    events = [event for index, sequence in enumerate(record.sequences) for event in _of_router(index, sequence)]
    for worker, found in stages.items():
        events += [_of_worker(worker, each, record.submitted_unix_s) for each in found]
    events.sort(key=lambda event: (event["start_ms"], event["sequence"]))
    return {
        **record.summary(),
        "now_ms": record.elapsed_ms(),
        "workers_asked": sorted(record.workers()),
        "workers_answered": sorted(stages),
        "events": events,
    }


def _of_router(index: int, sequence: SequenceHistory) -> Iterable[dict[str, Any]]:
    for each in sequence.attempts:
        detail = {"prefill": each.prefill, "decode": each.decode, "reasons": list(each.reasons)}
        detail |= {name: text for name, text in (("retry_of", each.cause), ("failed", each.failure)) if text}
        yield _event("router", "attempt", index, each.attempt, each.placed_ms, each.ended_ms, detail)
        for change in each.reassigned:
            yield _event("router", "reassigned", index, each.attempt, change["at_ms"], change["at_ms"], dict(change))
    if sequence.first_token_ms is not None:
        attempt = sequence.attempts[-1].attempt if sequence.attempts else 0
        yield _event("router", "first token", index, attempt, sequence.first_token_ms, sequence.first_token_ms, {})


def _of_worker(worker: str, stage: Stage, submitted_unix_s: float) -> dict[str, Any]:
    start_ms = (stage.start - submitted_unix_s) * 1000
    end_ms = (stage.end - submitted_unix_s) * 1000 if stage.end is not None else None
    return _event(worker, stage.name, stage.sequence, stage.attempt, start_ms, end_ms, dict(stage.detail))


def _event(
    lane: str, name: str, sequence: int, attempt: int, start_ms: float, end_ms: float | None, detail: dict[str, Any]
) -> dict[str, Any]:
    return {
        "lane": lane,
        "name": name,
        "sequence": sequence,
        "attempt": attempt,
        "start_ms": round(start_ms, 3),
        "end_ms": round(end_ms, 3) if end_ms is not None else None,
        "detail": detail,
    }


def latency_of(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Percentiles over the successful requests, from their submission. JSON-ready."""
    first_tokens, per_token, num_requests = [], [], 0
    for record in records:
        first_ms, finished_ms = record.first_token_ms(), record.finished_ms()
        if record.state != "finished" or first_ms is None or finished_ms is None:
            continue
        num_requests += 1
        first_tokens.append(first_ms)
        num_tokens = max(sequence.num_output_tokens for sequence in record.sequences)
        if num_tokens > 1:
            per_token.append((finished_ms - first_ms) / (num_tokens - 1))
    return {"requests": num_requests, "ttft_ms": percentiles(first_tokens), "tpot_ms": percentiles(per_token)}


def percentiles(values: list[float]) -> dict[str, float]:
    """By nearest rank: the smallest value that p percent of all values do not exceed. Empty without values."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[-(-len(ordered) * p // 100) - 1], 3) for p in PERCENTILES} if ordered else {}
