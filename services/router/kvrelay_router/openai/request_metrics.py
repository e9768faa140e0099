"""Measures requests as clients see them: OpenTelemetry's metrics for generative AI, and a span for each request.

While a request runs only its first and last token are timed. Everything else is recorded once, when its answer ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.telemetry.metrics import Instruments, Labels
from kvrelay.telemetry.tracer import TraceContext, Tracer, new_trace, parse_traceparent
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.dispatch.interface import ServedBy
from kvrelay_router.http.body import CLIENT_GONE
from kvrelay_router.openai.generation import PromptRun

OPERATION_BY_PATH = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/select": "select",
    "/generative_scoring": "score",
    "/invocations": "chat",
}
"""The measured paths, with the name of their operation in OpenTelemetry's conventions."""

PROVIDER = "kvrelay"
MOST_KEY_NAMES = 200
"""Further keys are counted together, so that metrics stay bounded."""

access_log = logging.getLogger("kvrelay.access")

# The buckets that the conventions recommend:
# https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-metrics.md
DURATION_S = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


TIMINGS = "timings"
"""The key of a request's `RequestTimings` in its ASGI state; the value is None if its path is not measured."""


@dataclass(slots=True)
class RequestTimings:
    """The times of one generation request in monotonic seconds; None until they are known."""

    operation: str
    began: float
    context: TraceContext
    parent: TraceContext | None
    model: str
    first_token: float | None = None
    last_token: float | None = None
    status: int = 0
    error: str = ""
    runs: Sequence[PromptRun] = ()
    served: Sequence[ServedBy] = ()

    def got_tokens(self) -> None:
        """Times the first tokens."""
        if self.first_token is None:
            self.first_token = time.monotonic()


class Usage(NamedTuple):
    """Tokens of a request, over all its prompts and choices. Cached ones are among the input."""

    input: int
    cached: int
    output: int

    @classmethod
    def of(cls, runs: Sequence[PromptRun]) -> Usage:
        return cls(
            sum(run.request.num_prompt_tokens for run in runs),
            sum(run.cached_tokens for run in runs),
            sum(choice.num_tokens for run in runs for choice in run.choices),
        )


class RequestMetrics:
    """Records the metrics and spans of requests: `model` until they name another. `tracer` is None if no traces are
    exported."""

    def __init__(
        self,
        model: str,
        instruments: Instruments | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        logs_access: bool = False,
    ) -> None:
        self._model = model
        self._logs_access = logs_access
        self._tracer = tracer
        self._clock = clock
        instruments = instruments or Instruments()
        self._durations = instruments.family("gen_ai.server.request.duration", DURATION_S)
        self._first_tokens = instruments.family("gen_ai.server.time_to_first_token", FIRST_TOKEN_S)
        self._per_token = instruments.family("gen_ai.server.time_per_output_token", PER_TOKEN_S)
        self._requests_of_keys = instruments.labelled_counter("kvrelay.usage.requests")
        self._tokens_of_keys = instruments.labelled_counter("kvrelay.usage.tokens")
        self._key_names: set[str] = set()

    def begin(self, path: str, traceparent: str) -> RequestTimings:
        operation = OPERATION_BY_PATH[path]
        if self._tracer is not None:
            context, parent = self._tracer.begin(traceparent, operation)
        else:  # pass the client's trace on to the workers
            parent = parse_traceparent(traceparent)
            context = parent or new_trace(is_sampled=False)
        return RequestTimings(operation, self._clock(), context, parent, self._model)

    def ended(self, timings: RequestTimings, names: RequestNames) -> None:
        """Records the metrics, the line of the access log and the span once the answer is complete, failed or
        cancelled."""
        now = self._clock()
        error = timings.error or (str(timings.status) if timings.status >= 400 else "")
        labels: Labels = (
            ("gen_ai.operation.name", timings.operation),
            ("gen_ai.provider.name", PROVIDER),
            ("gen_ai.request.model", timings.model),
        )
        self._durations((*labels, ("error.type", error)) if error else labels).record(now - timings.began)
        if not error and timings.first_token is not None:
            self._first_tokens(labels).record(timings.first_token - timings.began)
            num_tokens = max((choice.num_tokens for run in timings.runs for choice in run.choices), default=0)
            if num_tokens > 1:
                last = timings.last_token if timings.last_token is not None else now
                self._per_token(labels).record((last - timings.first_token) / (num_tokens - 1))
        usage = Usage.of(timings.runs)
        self._count(names.caller.name, timings.model, usage)
        if self._logs_access:
            _log_access(timings, names, usage, now, error)
        if self._tracer is not None and timings.context.is_sampled:
            self._trace(self._tracer, timings, usage, now, error, names.unique)

    def _count(self, key: str, model: str, usage: Usage) -> None:
        if key not in self._key_names:
            if len(self._key_names) >= MOST_KEY_NAMES:
                key = "other"
            self._key_names.add(key)
        labels: Labels = (("key", key), ("model", model))
        self._requests_of_keys[labels] += 1
        for kind, number in zip(("input", "cached", "output"), usage, strict=True):
            if number:
                self._tokens_of_keys[*labels, ("kind", kind)] += number

    def _trace(
        self, tracer: Tracer, timings: RequestTimings, usage: Usage, now: float, error: str, request_id: str
    ) -> None:
        choices = [choice for run in timings.runs for choice in run.choices]
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.operation.name": timings.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": timings.model,
            "gen_ai.usage.input_tokens": usage.input,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.usage.output_tokens": usage.output,
            "gen_ai.response.finish_reasons": tuple(choice.finish_reason or "none" for choice in choices),
            "http.response.status_code": timings.status,
            "kvrelay.request_id": request_id,
        }
        if timings.first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = timings.first_token - timings.began
        if error:
            attributes["error.type"] = error
        tracer.record(
            f"{timings.operation} {timings.model}",
            timings.context,
            timings.parent,
            timings.began,
            now,
            kind="server",
            attributes=attributes,
            error=error if error == CLIENT_GONE or timings.status >= 500 or timings.error else None,
        )


def _log_access(timings: RequestTimings, names: RequestNames, usage: Usage, now: float, error: str) -> None:
    """One line, with what text and JSON logs show as fields. Times are in milliseconds."""
    first = timings.first_token
    fields = {
        "request_id": names.public,
        "key": names.caller.name,
        "model": timings.model,
        "status": timings.status,
        "error": error,
        "input_tokens": usage.input,
        "cached_tokens": usage.cached,
        "output_tokens": usage.output,
        "ttft_ms": None if first is None else round(1e3 * (first - timings.began), 1),
        "duration_ms": round(1e3 * (now - timings.began), 1),
        "attempts": max((each.num_attempts for each in timings.served), default=0),
    }
    access_log.info(
        "%s", timings.operation, extra={name: value for name, value in fields.items() if value not in ("", None)}
    )
