"""The history of running and recently finished requests: attempts, workers, reasons, times and block counters.

Timelines, latency percentiles, and the spans of attempts are made of it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import msgspec

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import SequenceUsage, TimelineEvent
from kvrelay.telemetry.tracer import Attributes, Tracer, parse_traceparent
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed
from kvrelay_router.routing.estimates import Candidate, Decision

OUTCOMES = ("submitted", "finished", "failed", "timed_out", "cancelled", "refused")
PERCENTILES = (50, 90, 99)

FAILED = "abort"
"""`finish` of a sequence that failed."""


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: its workers, the reasons for choosing them, and the failure of the attempt before it."""

    attempt: int
    prefill: str | None
    decode: str | None
    policy: str
    reasons: tuple[str, ...]
    cause: str  # the failure of the attempt before it
    placed_ms: float
    trace: str = ""  # the trace context of its span
    numerics: list[str] = field(default_factory=list)  # of its workers, in order of use
    ended_ms: float | None = None
    failure: str = ""  # the cause if it failed
    reassigned: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class SequenceHistory:
    """One sequence. Times in milliseconds since the request was submitted."""

    attempts: list[AttemptRecord] = field(default_factory=list)
    num_output_tokens: int = 0
    cached_tokens: int | None = None
    usage: SequenceUsage | None = None
    finish: str | None = None
    error: str | None = None
    failure_kind: FailureKind | None = None
    first_token_ms: float | None = None
    finished_ms: float | None = None

    def failed(self, error: RequestFailed) -> None:
        self.finish = FAILED
        self.error, self.failure_kind = str(error), error.kind

    def as_json(self) -> dict[str, Any]:
        usage = msgspec.structs.asdict(self.usage) if self.usage is not None else None
        return asdict(self) | {"usage": usage}


class RequestRecord:
    """One request and its sequences."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.owner = request.owner
        self.session = request.session
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sequences = [SequenceHistory() for _ in range(request.num_sequences)]
        self.submitted_unix_s = time.time()
        self.state = "running"
        self.error: str | None = None
        self.failure_kind: FailureKind | None = None
        self.submitted = time.monotonic()

    def failed(self, error: RequestFailed) -> None:
        self.error, self.failure_kind = str(error), error.kind

    def elapsed_ms(self) -> float:
        """Milliseconds since the request was submitted."""
        return int((time.monotonic() - self.submitted) * 1e6 + 0.5) / 1000  # `round` writes the digits down for it

    def placed(self, sequence: int, attempt: int, decision: Decision, cause: str, trace: str) -> None:
        """An attempt was sent to its workers."""
        prefill = decision.prefill.worker_id if decision.prefill is not None else None
        decode = decision.decode.worker_id if decision.decode is not None else None
        record = AttemptRecord(
            attempt, prefill, decode, decision.policy, decision.reasons, cause, self.elapsed_ms(), trace
        )
        workers = (decision.prefill, decision.decode)
        record.numerics = list(dict.fromkeys(each.numerics for each in workers if each is not None and each.numerics))
        self.sequences[sequence].attempts.append(record)

    def attempt_ended(self, sequence: int, failure: str) -> None:
        """The current attempt of a sequence is over. `failure` is empty if it succeeded."""
        attempts = self.sequences[sequence].attempts
        if attempts and attempts[-1].ended_ms is None:
            attempts[-1].ended_ms, attempts[-1].failure = self.elapsed_ms(), failure

    def reassigned(self, sequence: int, decode: Candidate | None, cause: str) -> None:
        """The current attempt got another decode worker."""
        attempt = self.sequences[sequence].attempts[-1]
        attempt.decode = decode.worker_id if decode is not None else None
        if decode is not None and decode.numerics and decode.numerics not in attempt.numerics:
            attempt.numerics.append(decode.numerics)
        attempt.reassigned.append({"decode": attempt.decode, "cause": cause, "at_ms": self.elapsed_ms()})

    def workers(self) -> set[str]:
        attempts = [attempt for sequence in self.sequences for attempt in sequence.attempts]
        named = {name for attempt in attempts for name in (attempt.prefill, attempt.decode) if name}
        return named | {each["decode"] for attempt in attempts for each in attempt.reassigned if each["decode"]}

    def first_token_ms(self) -> float | None:
        """Returns the time from submission to the first token of any sequence."""
        return min((each.first_token_ms for each in self.sequences if each.first_token_ms is not None), default=None)

    def finished_ms(self) -> float | None:
        """Returns the time from submission to the end of the last sequence, or None while one runs."""
        ends = [sequence.finished_ms for sequence in self.sequences]
        return max((end for end in ends if end is not None), default=None) if None not in ends else None

    def summary(self) -> dict[str, Any]:
        """One line of a list, JSON-ready."""
        return {
            "request_id": self.request_id,
            "session": self.session or None,
            "state": self.state,
            "submitted_unix_s": self.submitted_unix_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": sum(sequence.num_output_tokens for sequence in self.sequences),
            "num_attempts": max((len(sequence.attempts) for sequence in self.sequences), default=0),
            "first_token_ms": self.first_token_ms(),
            "finished_ms": self.finished_ms(),
        }

    def as_json(self) -> dict[str, Any]:
        return self.summary() | {
            "error": self.error,
            "failure_kind": self.failure_kind,
            "sequences": [sequence.as_json() for sequence in self.sequences],
        }


class RequestRecords:
    """The records of the latest `capacity` requests."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Drops the oldest record if there are too many."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str, owner: str | None = None) -> RequestRecord | None:
        """Returns None if the id is unknown, its record was dropped, or the request is not of this owner."""
        record = self._records.get(request_id)
        return record if record is None or owner in (None, record.owner) else None

    def latest(self, limit: int, owner: str | None = None, session: str | None = None) -> list[RequestRecord]:
        """The newest of an owner and session first; None: of all owners, of all sessions."""
        newest = reversed(self._records.values())
        matching = (each for each in newest if owner in (None, each.owner) and session in (None, each.session))
        return list(islice(matching, limit))

    def usage_came_late(self, request_id: str, sequence: int, usage: SequenceUsage) -> None:
        """Adds the block counters of a sequence that the router ended itself because of a stop string."""
        record = self._records.get(request_id)
        if record is not None and 0 <= sequence < len(record.sequences):
            record.sequences[sequence].usage = usage


class RequestCounts:
    """Counts since the start. There are as many owners as API keys."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, outcome: str, owner: str) -> None:
        self._counts[outcome, owner] += 1

    def of(self, owner: str | None) -> dict[str, int]:
        """The number of requests of an owner (None: of all) by outcome."""
        counts = dict.fromkeys(OUTCOMES, 0)
        for (outcome, each), count in self._counts.items():
            if owner in (None, each):
                counts[outcome] += count
        return counts


def timeline_of(record: RequestRecord, of_workers: Mapping[str, list[TimelineEvent]]) -> dict[str, Any]:
    """JSON-ready. `of_workers` are the workers' own events.

    Times are milliseconds since the request was submitted. Times of workers come from the clocks of their machines.
    """
    events = [event for index, sequence in enumerate(record.sequences) for event in _of_router(index, sequence)]
    for worker, found in of_workers.items():
        events += [_of_worker(worker, each, record.submitted_unix_s) for each in found]
    events.sort(key=lambda event: (event["start_ms"], event["sequence"]))
    return {
        **record.summary(),
        "now_ms": record.elapsed_ms(),
        "workers_asked": sorted(record.workers()),
        "workers_answered": sorted(of_workers),
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


def _of_worker(worker: str, event: TimelineEvent, submitted_unix_s: float) -> dict[str, Any]:
    start_ms = (event.start - submitted_unix_s) * 1000
    end_ms = (event.end - submitted_unix_s) * 1000 if event.end is not None else None
    return _event(worker, event.name, event.sequence, event.attempt, start_ms, end_ms, dict(event.detail))


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
    if attempt.numerics:
        attributes["kvrelay.numerics"] = tuple(attempt.numerics)
    return attributes
