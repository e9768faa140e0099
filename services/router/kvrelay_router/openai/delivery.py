"""The HTTP answer of a generation: runs it, writes it, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext

from orjson import dumps
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.http.api_error import ApiError, json_response
from kvrelay_router.http.client_watch import ClientGone, ClientWatch, TaskTimeout
from kvrelay_router.http.event_writer import EVENT_WRITER, EventWriter
from kvrelay_router.openai.answers.answer_format import AnswerFormat, Collected, usage_of
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.error_mapping import as_api_error
from kvrelay_router.openai.generation import Generation, PromptRun, Step
from kvrelay_router.openai.request_metrics import CLIENT_GONE, TIMINGS, RequestTimings

TIMEOUT_GRACE_S = 5.0
"""Dispatch keeps the deadline; this much later the HTTP layer gives up on its own, so that nothing ever hangs."""

ROUTE_HEADER = "x-kvrelay-route"
"""Sent with any value, it asks for the decision of the router, with its reasons, in the answer's header."""

DONE = b"data: [DONE]\n\n"

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def _events(answer: AnswerFormat, steps: list[Step]) -> bytes:
    return answer.chunk(steps[0]) if len(steps) == 1 else b"".join([answer.chunk(step) for step in steps])


class _EventSink:
    """Writes deltas of the only prompt as events, at once."""

    def __init__(self, generation: Generation, answer: AnswerFormat, writer: EventWriter) -> None:
        self._generation, self._answer, self._writer = generation, answer, writer
        self._choices = [(choice, answer.around_text(choice.index)) for choice in generation.runs[0].choices]
        self.is_ready = writer.is_ready

    def take(self, deltas: list[SequenceDelta]) -> None:
        """A batch; nothing is written while all of it is withheld."""
        events = b""
        for delta in deltas:
            choice, around = self._choices[delta.sequence]
            if around is None or (text := choice.next_text(delta)) is None:
                events += _events(self._answer, self._generation.take([delta]))
            elif text:
                events += around[0] + dumps(text) + around[1]
        if events:
            self._writer.write(events)


class GenerationResponse(Response):
    """Serves one validated generation. Nothing is submitted before it is called."""

    def __init__(
        self,
        service: ApiService,
        runs: Sequence[PromptRun],
        answer: AnswerFormat,
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self.background = None
        self._service = service
        self._runs = runs
        self._answer = answer
        self._stream = stream
        self._include_usage = include_usage
        self._timeout_s = service.settings.request_timeout_s + TIMEOUT_GRACE_S
        self._stream_started = False
        self._whole_started = False
        self._wants_route = False
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
            with self._service.in_progress:
                async with self._service.rate_limiter.admit(names.key, names.unique, self._timeout_s):
                    generation = Generation(self._service.dispatcher, self._runs)
                    await generation.prepare()
                    with generation:
                        if self._stream:
                            await self._send_stream(generation, send, scope["state"].pop(EVENT_WRITER, None))
                            return
                        response = await self._whole(generation)
        self._whole_started = True
        writer: EventWriter | None = scope["state"].pop(EVENT_WRITER, None)
        with writer.in_one_write() if writer is not None else nullcontext():
            await response(scope, receive, send)

    async def _whole(self, generation: Generation) -> Response:
        collected = [Collected(run, choice) for run in self._runs for choice in run.choices]
        by_choice = {id(each.choice): each for each in collected}
        async with aclosing(generation.steps()) as batches:
            async for steps in batches:
                self._note_tokens()
                for step in steps:
                    by_choice[id(step.choice)].add(step.output)
        self._note_end()
        content = self._answer.whole(collected, usage_of(self._runs))
        return json_response(content, headers=self._answer_headers(generation))

    async def _send_stream(self, generation: Generation, send: Send, writer: EventWriter | None) -> None:
        """The answer starts with the first delta, so whatever fails before it still gets its status.

        Most of the others go to the connection in the callback that brings them; here come those that must wait for it,
        and the end, which is written at once with the last events. So is the head with the first ones.
        """
        if writer is not None:
            writer.carries_events = True
            generation.push_to(_EventSink(generation, self._answer, writer))
        one_write = writer.in_one_write if writer is not None else nullcontext
        events = b""
        async with aclosing(generation.steps()) as batches:
            async for steps in batches:
                self._note_tokens()
                events = _events(self._answer, steps)
                if generation.is_over:
                    continue  # they go out with the end
                with one_write() if not self._stream_started else nullcontext():
                    if not self._stream_started:
                        await self._start_stream(generation, send)
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                events = b""
        self._note_end()
        usage = self._answer.usage_chunk(usage_of(self._runs)) if self._include_usage else b""
        with one_write():
            if not self._stream_started:
                await self._start_stream(generation, send)
            await send({"type": "http.response.body", "body": events + usage + DONE})

    def _answer_headers(self, generation: Generation) -> dict[str, str]:
        headers = generation.served_by_headers()
        return headers | {ROUTE_HEADER: generation.routes()} if self._wants_route else headers

    async def _start_stream(self, generation: Generation, send: Send) -> None:
        self._stream_started = True
        own = self._answer_headers(generation).items()
        headers = [*STREAM_HEADERS, *[(name.encode(), value.encode("latin-1", "replace")) for name, value in own]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _note_tokens(self) -> None:
        if self._timings is not None:
            self._timings.got_tokens()

    def _note_end(self) -> None:
        if self._timings is not None:
            self._timings.last_token = time.monotonic()

    def _note_error(self, error: str) -> None:
        if self._timings is not None:
            self._timings.error = error

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """A status while nothing was sent; an event in a stream. An answer that is cut off ends with its connection."""
        self._note_error(error.code or str(error.status))
        if self._whole_started:
            return
        if not self._stream_started:
            await error.response()(scope, receive, send)
            return
        event = b"data: " + dumps(error.body()) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": event})
