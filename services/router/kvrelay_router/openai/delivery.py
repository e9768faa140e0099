"""The HTTP answer of a generation: runs it, writes it, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.http.client_watch import CLIENT_GONE, ClientGone, ClientWatch
from kvrelay_router.http.error_response import error_response, json_response
from kvrelay_router.http.event_stream import EventStream
from kvrelay_router.http.pending_memory import BODY
from kvrelay_router.openai.answers.answer_format import AnswerFormat, DocumentFormat, EventFormat, usage_of
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.error_mapping import as_api_error
from kvrelay_router.openai.generation import Generation
from kvrelay_router.openai.planning import Plan
from kvrelay_router.openai.request_metrics import TIMINGS, RequestTimings

TIMEOUT_GRACE_S = 5.0
"""Dispatch enforces the deadline. If it has not ended the request after this time, the HTTP layer does."""

ROUTE_HEADER = "x-kvrelay-route"
"""Sent with any value, it asks for the decision of the router, with its reasons, in the answer's header."""

LIFE_SIGN_INTERVAL_S = 15.0
"""Proxies close connections that are silent for a minute."""


class GenerationResponse(Response):
    """Serves one validated generation. Nothing is submitted before it is called."""

    def __init__(self, service: ApiService, plan: Plan, answer: AnswerFormat) -> None:
        self.background = None
        self._service = service
        self._runs = plan.runs
        self._shape = plan.shape
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
            request, service = self._runs[0].request, self._service
            in_progress = service.in_progress.admit(request.tenant, request.weight, service.settings.model_name)
            with in_progress, service.memory.hold(self._shape.memory_bytes):
                scope["state"][BODY].release()
                async with self._service.rate_limiter.admit(names.key, names.unique, self._timeout_s):
                    if isinstance(self._answer, EventFormat):
                        await self._send_stream(self._answer, stream)
                        watch.stop()
                        return
                    response = await self._whole(self._answer)
                    watch.stop()
        self._whole_started = True
        await response(scope, receive, send)

    async def _whole(self, answer: DocumentFormat) -> Response:
        with await Generation(self._service.dispatcher, self._runs, answer.add).submit() as generation:
            while not generation.is_over:
                await generation.wait()
                self._take(generation)
            self._timings.last_token = time.monotonic()
            await answer.finish()
            document = answer.document(usage_of(self._runs))
            return json_response(document, headers=self._answer_headers(generation))

    async def _send_stream(self, answer: EventFormat, stream: EventStream) -> None:
        """The answer starts with the first tokens, so a failure before them still gets its own status. A request that
        waits for a worker starts its answer with the first life sign.

        The last events go out with the end. Nearly all other events are written by the callback that receives their
        tokens.
        """
        events = b""
        with await Generation(self._service.dispatcher, self._runs, answer.add, stream).submit() as generation:
            while not generation.is_over:
                needs_sign = await generation.wait(LIFE_SIGN_INTERVAL_S)
                events = self._take(generation)
                if generation.is_over:
                    break
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
            last = answer.end(usage_of(self._runs))
            await self._start(generation, stream)
            await stream.end(events + last + answer.done)

    async def _start(self, generation: Generation, stream: EventStream) -> None:
        if not stream.is_started:
            await stream.start(self._answer_headers(generation).items())

    def _answer_headers(self, generation: Generation) -> dict[str, str]:
        headers = generation.served_by_headers()
        return headers | {ROUTE_HEADER: generation.routes()} if self._wants_route else headers

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
        assert isinstance(self._answer, EventFormat)
        await stream.end(self._answer.failure(error) + self._answer.done)
