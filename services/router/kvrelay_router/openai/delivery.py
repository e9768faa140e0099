"""The HTTP answer of a generation: runs it, writes it, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect
from itertools import accumulate

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.text.request.api_error import ApiError, no_worker_ready
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.dispatch.interface import NoWorkerReady, RequestFailed, TooLate
from kvrelay_router.http.body import BODY, CLIENT_GONE, ClientGone, ClientWatch
from kvrelay_router.http.error_response import error_response, json_response
from kvrelay_router.http.event_stream import EventStream
from kvrelay_router.openai.answer_format import AnswerFormat, usage_of
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import Generation
from kvrelay_router.openai.planning import Plan
from kvrelay_router.openai.request_metrics import TIMINGS, RequestTimings

log = logging.getLogger(__name__)

TIMEOUT_GRACE_S = 5.0
"""Dispatch enforces the deadline. If it has not ended the request after this time, the HTTP layer does."""

ROUTE_HEADER = "x-kvrelay-route"
"""Sent with any value, it asks for the decision of the router, with its reasons, in the answer's header."""

MAX_ROUTES_BYTES = 4094
"""Proxies take 4 KiB of a header, which a list of routes fills with its brackets."""
MAX_NAMES_BYTES = 1024
NOTE_BYTES = 32

LIFE_SIGN_INTERVAL_S = 15.0
"""Proxies close connections that are silent for a minute."""


class GenerationResponse(Response):
    """Serves one validated generation. Nothing is submitted before it is called."""

    def __init__(self, service: ApiService, plan: Plan, answer: AnswerFormat) -> None:
        self.background = None
        self._service = service
        self._runs, self._plan = plan.runs, plan
        self._answer = answer
        self._timeout_s = service.settings.request_timeout_s + TIMEOUT_GRACE_S
        self._whole_started = False
        self._wants_route = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the generation to its end, in one way or another."""
        self._timings: RequestTimings = scope["state"][TIMINGS]
        self._timings.runs = self._runs
        self._wants_route = Headers(scope=scope).get(ROUTE_HEADER, "") not in ("", "0", "false")
        stream = EventStream(send)
        try:
            with ClientWatch(receive) as watch:
                try:
                    await self._run(scope, receive, send, stream, watch)
                except Exception as error:
                    watch.stop()
                    await self._fail(as_api_error(error), scope, receive, send, stream)
        except ClientGone:
            self._timings.error = CLIENT_GONE
            return
        except asyncio.CancelledError:
            stopping = ApiError("The server is stopping", status=503, code="stopping")
            await self._fail(stopping, scope, receive, send, stream)

    async def _run(self, scope: Scope, receive: Receive, send: Send, stream: EventStream, watch: ClientWatch) -> None:
        async with asyncio.timeout(self._timeout_s):
            names: RequestNames = scope["state"]["names"]
            service = self._service
            in_progress = service.in_progress.admit(self._plan.caller, service.settings.model_name)
            with in_progress, service.memory.hold(self._plan.memory_bytes):
                scope["state"][BODY].release()
                async with service.rate_limiter.admit(self._plan.caller.key, names.unique, self._timeout_s):
                    response = await self._generate(stream)
                    watch.stop()
        if response is not None:  # what bounds the generation does not wait for a client that reads slowly
            self._whole_started = True
            await response(scope, receive, send)

    async def _generate(self, stream: EventStream) -> Response | None:
        """Runs the generation, and writes its stream to the end. Returns an answer in one piece, which is not sent yet.

        A stream starts with the first tokens, so a failure before them still gets its own status. If its request waits
        for a worker, it starts with the first life sign. Nearly all events are written by the callback that receives
        their tokens; the last ones go out with the end.
        """
        answer = self._answer
        add, own_stream = (answer.add, stream) if answer.is_stream else (answer.keep, None)
        with await Generation(self._service.dispatcher, self._runs, add, own_stream).submit() as generation:
            self._timings.served = generation.served_by()
            events = b""
            while not generation.is_over:
                needs_sign = await generation.wait(LIFE_SIGN_INTERVAL_S if answer.is_stream else None)
                events = self._take(generation)
                if generation.is_over or not answer.is_stream:
                    continue
                if needs_sign and not events:
                    events = answer.life_sign
                elif not (events or generation.has_tokens):
                    continue  # the request began to wait for a worker
                await self._start(generation, stream)
                if events:
                    await stream.send(events)
                    events = b""
            self._timings.last_token = time.monotonic()
            await answer.finish()
            usage = usage_of(self._runs)
            if not answer.is_stream:
                return json_response(answer.document(usage), headers=self._answer_headers(generation))
            last = answer.end(usage)
            await self._start(generation, stream)
            await stream.end(events + last + answer.done)
            return None

    async def _start(self, generation: Generation, stream: EventStream) -> None:
        if not stream.is_started:
            await stream.start(self._answer_headers(generation).items())

    def _answer_headers(self, generation: Generation) -> dict[str, str]:
        """The workers that took part, their numerics, and if asked for, the decisions behind it as JSON, one for each
        prompt."""
        served = generation.served_by()
        parts = {
            "x-kvrelay-prefill": dict.fromkeys(each.prefill for each in served if each.prefill),
            "x-kvrelay-decode": dict.fromkeys(each.decode for each in served if each.decode),
            "x-kvrelay-numerics": dict.fromkeys(numerics for each in served for numerics in each.numerics),
        }
        headers = {name: _fitting(list(ids), ", ", MAX_NAMES_BYTES, "%d more") for name, ids in parts.items() if ids}
        if self._wants_route:
            routes = [json.dumps(each.describe_route(), separators=(",", ":")) for each in served]
            joined = _fitting(routes, ",", MAX_ROUTES_BYTES, '{"left_out":%d}')
            headers[ROUTE_HEADER] = joined if [joined] == routes else f"[{joined}]"
        return headers

    def _take(self, generation: Generation) -> bytes:
        events = generation.take()
        if generation.has_tokens:
            self._timings.got_tokens()
        return events

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send, stream: EventStream) -> None:
        """Reports the error: as an HTTP status if nothing was sent, as an event in a stream. Another body that was
        sent in part ends with its connection."""
        self._timings.error = error.code or str(error.status)
        if self._whole_started:
            return
        if not stream.is_started:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await stream.end(self._answer.failure(error) + self._answer.done)


def _fitting(texts: list[str], separator: str, num_bytes: int, note: str) -> str:
    """The texts, joined. If they have more bytes, as many of the first as fit beside a note of how many do not."""
    joined = separator.join(texts)
    if len(joined) <= num_bytes:
        return joined
    ends = accumulate(len(text) + len(separator) for text in texts)
    num_fitting = bisect(list(ends), num_bytes - NOTE_BYTES)
    return separator.join([*texts[:num_fitting], note % (len(texts) - num_fitting)])


_FAILURES: dict[FailureKind, tuple[int, str]] = {
    FailureKind.DEADLINE: (504, "request_timeout"),
    FailureKind.CANCELLED: (499, "request_cancelled"),
    FailureKind.TOO_LARGE: (400, "exceeds_worker_capacity"),
    FailureKind.NO_TOKEN_ALLOWED: (400, "no_token_allowed"),
    FailureKind.GRAMMAR_FAILED: (400, "grammar_failed"),
    FailureKind.BAD_LOGITS: (502, "bad_logits"),
    FailureKind.OUT_OF_MEMORY: (502, "out_of_memory"),
    FailureKind.DEVICE_LOST: (502, "device_lost"),
    FailureKind.ENGINE_ERROR: (502, "engine_error"),
    FailureKind.DRAINING: (503, "worker_draining"),
    FailureKind.WORKER_LOST: (502, "worker_lost"),
    FailureKind.NO_DECODE_WORKER: (503, "no_decode_worker"),
    FailureKind.PROTOCOL_ERROR: (502, "protocol_error"),
    FailureKind.NO_WORKER: (503, "no_worker_ready"),
    FailureKind.ROUTER_SHUTDOWN: (503, "router_shutdown"),
    FailureKind.INTERNAL_ERROR: (500, "internal_error"),
}
"""HTTP status and error code of a request that failed after it was accepted."""


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error answer for an exception. Unexpected ones are logged; the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoWorkerReady):
        return no_worker_ready(str(error), error.retry_after_s)
    if isinstance(error, TooLate):
        return ApiError(str(error), status=429, code="deadline_unreachable", retry_after_s=error.retry_after_s)
    if isinstance(error, RequestFailed):
        status, code = _FAILURES[error.kind]
        return ApiError(str(error), status=status, code=code, retry_after_s=1 if status == 503 else None)
    if isinstance(error, TimeoutError):
        return ApiError("The request timed out", status=504, code="request_timeout")
    log.error("unexpected error while serving a request", exc_info=error)
    return ApiError("The server had an error while processing the request", status=500, code="internal_error")
