"""The HTTP answer of a generation: runs it, writes it, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.http.anthropic_errors import error_response
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.client_watch import ClientGone, ClientWatch, TaskTimeout
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter
from kvrelay_router.http.json_parts import PartsResponse, dump_at_once, send_parts
from kvrelay_router.openai.answers.answer_format import AnswerFormat, DocumentFormat, EventFormat, usage_of
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.error_mapping import as_api_error
from kvrelay_router.openai.generation import Generation
from kvrelay_router.openai.planning import Plan
from kvrelay_router.openai.request_metrics import CLIENT_GONE, TIMINGS, RequestTimings

TIMEOUT_GRACE_S = 5.0
"""Dispatch enforces the deadline. If it has not ended the request after this time, the HTTP layer does."""

ROUTE_HEADER = "x-kvrelay-route"
"""Sent with any value, it asks for the decision of the router, with its reasons, in the answer's header."""

LIFE_SIGN_INTERVAL_S = 15.0
"""Proxies close connections that are silent for a minute."""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class GenerationResponse(Response):
    """Serves one validated generation. Nothing is submitted before it is called."""

    def __init__(self, service: ApiService, plan: Plan, answer: AnswerFormat) -> None:
        self.background = None
        self._service = service
        self._runs = plan.runs
        self._shape = plan.shape
        self._answer = answer
        self._timeout_s = service.settings.request_timeout_s + TIMEOUT_GRACE_S
        self._writer: EventWriter | None = None
        self._stream_started = False
        self._whole_started = False
        self._wants_route = False
        self._has_tokens = False
        self._timings: RequestTimings | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the generation to its end, in one way or another."""
        self._timings = scope["state"][TIMINGS]
        if self._timings is not None:
            self._timings.runs = self._runs
        self._wants_route = Headers(scope=scope).get(ROUTE_HEADER, "") not in ("", "0", "false")
        try:
            with ClientWatch(receive, scope["state"].get(EVENT_WRITER)):
                try:
                    await self._run(scope, receive, send)
                except Exception as error:
                    await self._fail(as_api_error(error), scope, receive, send)
        except ClientGone:
            self._note_error(CLIENT_GONE)
            return
        except asyncio.CancelledError:
            stopping = ApiError("The server is stopping", status=503, error_type="server_error", code="stopping")
            await self._fail(stopping, scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with TaskTimeout(self._timeout_s):
            names: RequestNames = scope["state"]["names"]
            request, service = self._runs[0].request, self._service
            in_progress = service.in_progress.admit(request.tenant, request.weight, service.settings.model_name)
            with in_progress, service.memory.hold(self._shape.memory_bytes):
                if (writer := scope["state"].get(EVENT_WRITER)) is not None:
                    writer.body.release()
                async with self._service.rate_limiter.admit(names.key, names.unique, self._timeout_s):
                    generation = Generation(self._service.dispatcher, self._runs, self._answer.add, self._note_tokens)
                    await generation.prepare()
                    self._writer = scope["state"].pop(EVENT_WRITER, None)
                    if isinstance(self._answer, EventFormat):
                        await self._send_stream(self._answer, generation, send)
                        return
                    response = await self._whole(self._answer, generation)
                if isinstance(response, PartsResponse):
                    self._whole_started = True
                    await response(scope, receive, send)
                    return
        self._whole_started = True
        with self._in_one_write():
            await response(scope, receive, send)

    async def _whole(self, answer: DocumentFormat, generation: Generation) -> Response:
        with await generation.submit(can_push=lambda: self._has_tokens, push=_drop):
            while not generation.is_over:
                await generation.wait()
                generation.take()
            self._note_end()
            await answer.finish()
            document = answer.document(usage_of(self._runs))
            headers = self._answer_headers(generation)
            if self._shape.is_large:
                return PartsResponse(document, headers)
            return Response(dump_at_once(document), 200, headers, media_type="application/json")

    async def _send_stream(self, answer: EventFormat, generation: Generation, send: Send) -> None:
        """The answer starts with the first tokens, so a failure before them still gets its own status. A request that
        waits for a worker starts its answer with the first life sign.

        Head and first events go out in one write, and so do the last events and the end. Nearly all other events are
        written by the callback that receives their tokens.
        """
        writer = self._writer
        push: Callable[[bytes], None]
        if writer is not None:
            writer.carries_events = True
            can_push, push = writer.is_ready, writer.write
        else:  # another server: only `send` can write
            can_push, push = _never, _drop
        events = b""
        with answer.calling(generation.wake), await generation.submit(can_push, push):
            while not generation.is_over:
                needs_sign = await generation.wait(LIFE_SIGN_INTERVAL_S)
                events = generation.take()
                if (large := answer.take_large()) is not None:
                    await self._send_large(large, answer, generation, send)
                if generation.is_over:
                    break  # these events go out with the end
                if needs_sign and not events:
                    events = answer.life_sign
                elif not (events or self._has_tokens):
                    continue  # the request began to wait for a worker
                with self._in_one_write() if not self._stream_started else nullcontext():
                    if not self._stream_started:
                        await self._start_stream(generation, send)
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                events = b""
            self._note_end()
            await answer.finish()
            last = answer.end(usage_of(self._runs))
            if (large := answer.take_large()) is not None:
                if events:
                    if not self._stream_started:
                        await self._start_stream(generation, send)
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await self._send_large(large, answer, generation, send)
                events = b""
            events += last + answer.done
            with self._in_one_write():
                if not self._stream_started:
                    await self._start_stream(generation, send)
                await send({"type": "http.response.body", "body": events})

    async def _send_large(
        self, large: Iterator[bytes] | None, answer: EventFormat, generation: Generation, send: Send
    ) -> None:
        """Sends events in parts. No comment may come between the parts."""
        if not self._stream_started:
            await self._start_stream(generation, send)
        if self._writer is not None:
            self._writer.carries_events = False
        while large is not None:
            await send_parts(large, send)
            large = answer.take_large()
        if self._writer is not None:
            self._writer.carries_events = True

    def _in_one_write(self) -> AbstractContextManager[None]:
        return self._writer.in_one_write() if self._writer is not None else nullcontext()

    def _answer_headers(self, generation: Generation) -> dict[str, str]:
        headers = generation.served_by_headers()
        return headers | {ROUTE_HEADER: generation.routes()} if self._wants_route else headers

    async def _start_stream(self, generation: Generation, send: Send) -> None:
        self._stream_started = True
        own = self._answer_headers(generation).items()
        headers = [*STREAM_HEADERS, *[(name.encode(), value.encode("latin-1", "replace")) for name, value in own]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _note_tokens(self) -> None:
        self._has_tokens = True
        if self._timings is not None:
            self._timings.got_tokens()

    def _note_end(self) -> None:
        if self._timings is not None:
            self._timings.last_token = time.monotonic()

    def _note_error(self, error: str) -> None:
        if self._timings is not None:
            self._timings.error = error

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Reports the error: as an HTTP status if nothing was sent, as an event in a stream. Another body that was
        sent in part ends with its connection."""
        self._note_error(error.code or str(error.status))
        if self._whole_started:
            return
        if not self._stream_started:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        assert isinstance(self._answer, EventFormat)
        await send({"type": "http.response.body", "body": self._answer.failure(error) + self._answer.done})


def _never() -> bool:
    return False


def _drop(events: bytes) -> None:
    """An answer in one piece has no events."""
