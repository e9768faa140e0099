"""Responses as server-sent events and as one JSON object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import orjson

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.answers.answer_format import DocumentFormat, EventFormat
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.output_items import MessageItem, OutputItem, OutputItems, Score, Step
from kvrelay_router.responses.response_object import ResponseObject


class ResponseStream(EventFormat):
    """Every item and part has its `added`, `delta` and `done` events, numbered from 0."""

    done = b""

    def __init__(self, response: ResponseObject, run: PromptRun, output: OutputItems) -> None:
        self._response, self._output = response, output
        (self._choice,) = run.choices
        self._num_events = 0
        self._around_delta = b"", b""  # of the item that is open

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Returns the events for new text."""
        opening = b"" if self._num_events else self._start()
        return opening + self._events(self._output.feed(choice, text), "completed")

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        events = b"" if self._num_events else self._start()
        events += self._events(self._output.end(self._choice), self._response.status)
        kind = "response.incomplete" if self._response.was_cut else "response.completed"
        return events + self._event(kind, response=self._response.ended(self._output.fields(self._response.status)))

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.code is None else error.code
        return self._event("response.failed", response=self._response.failed(code, error.message))

    def _start(self) -> bytes:
        begun = self._response.begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _events(self, steps: Iterable[Step], status: str) -> bytes:
        """`status`: of an item that ends."""
        events = b""
        for kind, item, text, scores in steps:
            if kind == "text":
                events += self._delta(item, text, scores)
            elif kind == "begun":
                events += self._begin(item)
            else:
                events += self._end_item(item, status)
        return events

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": len(self._output.items) - 1}
        return {**place, "content_index": 0} if item.has_part else place

    def _begin(self, item: OutputItem) -> bytes:
        index = len(self._output.items) - 1
        events = self._event("response.output_item.added", output_index=index, item=item.fields("in_progress"))
        kind, place = f"{item.events}.delta", self._place(item)
        head = {"type": kind, **place, **({"logprobs": []} if isinstance(item, MessageItem) else {})}
        before = b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), orjson.dumps(head)[:-1])
        self._around_delta = before, b',"delta":'
        if not item.has_part:
            return events
        return events + self._event("response.content_part.added", **place, part=item.part)

    def _delta(self, item: OutputItem, text: str, scores: list[Score]) -> bytes:
        """Everything around the text of an event that brings nothing else is written once for each item."""
        if scores:
            return self._event(f"{item.events}.delta", **self._place(item), delta=text, logprobs=scores)
        number, self._num_events = self._num_events, self._num_events + 1
        before, after = self._around_delta
        return b"%b%d%b%b}\n\n" % (before, number, after, orjson.dumps(text))

    def _end_item(self, item: OutputItem, status: str) -> bytes:
        place = self._place(item)
        events = self._event(f"{item.events}.done", **place, **item.done_fields)
        if item.has_part:
            events += self._event("response.content_part.done", **place, part=item.part)
        index = place["output_index"]
        return events + self._event("response.output_item.done", output_index=index, item=item.fields(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class ResponseAnswer(DocumentFormat):
    """One JSON object."""

    def __init__(self, response: ResponseObject, run: PromptRun, output: OutputItems) -> None:
        self._response, self._output = response, output
        (self._choice,) = run.choices

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Keeps what the text says."""
        deque(self._output.feed(choice, text), maxlen=0)
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        deque(self._output.end(self._choice), maxlen=0)
        return self._response.ended(self._output.fields(self._response.status))
