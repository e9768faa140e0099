"""Responses as server-sent events and as one JSON object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.json_parts import dump_at_once, json_parts
from kvrelay_router.openai.answers.answer_format import DocumentFormat, EventFormat
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.output_items import MessageItem, OutputItem, OutputItems, Step
from kvrelay_router.responses.response_object import ResponseObject


class ResponseStream(EventFormat):
    """Every item and part has its `added`, `delta` and `done` events, numbered from 0."""

    done = b""

    def __init__(self, response: ResponseObject, run: PromptRun, output: OutputItems) -> None:
        super().__init__()
        self._response, self._output = response, output
        (self._choice,) = run.choices
        self._num_events = 0
        self._around_delta = b"", b""  # JSON before and after a delta of the open item
        self._last_steps: list[Step] = []
        self._end_steps: list[Step] = []
        self._ended: dict[str, Any] = {}

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        opening = b"" if self._num_events else self._start()
        steps = list(self._output.feed(choice))
        if choice.finish_reason is not None and self._output.are_large:
            self._last_steps = steps  # `end` has their events written in parts
            return opening
        return opening + self._events(steps, "completed")

    async def finish(self) -> None:
        self._end_steps = list(self._output.end(self._choice))
        self._ended = await self._response.ended(self._output.fields(self._response.status))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        last = self._last_events()
        if not self._output.are_large:
            return b"".join(last)
        return self._keep_large(last)

    def _last_events(self) -> Iterator[bytes]:
        if not self._num_events:
            yield self._start()
        status = self._response.status
        for step in self._last_steps:
            yield from self._parts(step, "completed")
        for step in self._end_steps:
            yield from self._parts(step, status)
        kind = "response.incomplete" if self._response.was_cut else "response.completed"
        yield from self._event_parts(kind, response=self._ended)

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.code is None else error.code
        return self._event("response.failed", response=self._response.failed(code, error.message))

    def _start(self) -> bytes:
        begun = self._response.begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _events(self, steps: Iterable[Step], status: str) -> bytes:
        """`status`: of an item that ends."""
        return b"".join(part for step in steps for part in self._parts(step, status))

    def _parts(self, step: Step, status: str) -> Iterator[bytes]:
        kind, item, text, scores = step
        if kind == "text":
            yield from self._delta(item, text, scores)
        elif kind == "begun":
            yield self._begin(item)
        else:
            yield from self._item_end(item, status)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": self._output.items.index(item)}
        return {**place, "content_index": 0} if item.has_part else place

    def _begin(self, item: OutputItem) -> bytes:
        index = self._output.items.index(item)
        events = self._event("response.output_item.added", output_index=index, item=item.fields("in_progress"))
        kind, place = f"{item.events}.delta", self._place(item)
        head = {"type": kind, **place, **({"logprobs": []} if isinstance(item, MessageItem) else {})}
        before = b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), orjson.dumps(head)[:-1])
        self._around_delta = before, b',"delta":'
        if not item.has_part:
            return events
        return events + self._event("response.content_part.added", **place, part=item.empty_part)

    def _delta(self, item: OutputItem, text: str, scores: list[TokenLogprobs]) -> Iterator[bytes]:
        """Everything around the text of an event that brings nothing else is written once for each item."""
        if scores:
            rows = self._output.scores.rows(scores)
            yield from self._event_parts(f"{item.events}.delta", **self._place(item), delta=text, logprobs=rows)
            return
        number, self._num_events = self._num_events, self._num_events + 1
        before, after = self._around_delta
        yield b"%b%d%b%b}\n\n" % (before, number, after, orjson.dumps(text))

    def _item_end(self, item: OutputItem, status: str) -> Iterator[bytes]:
        place = self._place(item)
        yield from self._event_parts(f"{item.events}.done", **place, **item.done_fields)
        if item.has_part:
            yield from self._event_parts("response.content_part.done", **place, part=item.part)
        index = place["output_index"]
        yield from self._event_parts("response.output_item.done", output_index=index, item=item.fields(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        return b"".join(self._event_parts(kind, **fields))

    def _event_parts(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """The event, in parts if the output is large."""
        number, self._num_events = self._num_events, self._num_events + 1
        content = {"type": kind, "sequence_number": number, **fields}
        yield b"event: %b\ndata: " % kind.encode()
        if self._output.are_large:
            yield from json_parts(content)
        else:
            yield dump_at_once(content)
        yield b"\n\n"


class ResponseAnswer(DocumentFormat):
    """One JSON object."""

    def __init__(self, response: ResponseObject, run: PromptRun, output: OutputItems) -> None:
        self._response, self._output = response, output
        (self._choice,) = run.choices
        self._ended: dict[str, Any] = {}

    async def finish(self) -> None:
        deque(self._output.feed(self._choice), maxlen=0)
        deque(self._output.end(self._choice), maxlen=0)
        self._ended = await self._response.ended(self._output.fields(self._response.status))

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._ended
