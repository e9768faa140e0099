"""Responses as server-sent events and as one JSON object."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson

from kvrelay.text.choice import Choice
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.openai.answers.answer_format import DocumentFormat, EventFormat
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.output_items import EVENTS, OutputItem, OutputItems, Scores, Step
from kvrelay_router.responses.responses_request import ResponsesRequest

Keep = Callable[[dict[str, Any]], Awaitable[bool]]
"""Stores a response at its end. Returns whether it did."""


class ResponseObject:
    """The object that the answer is, and that events of a stream carry: the fields that do not change, and those of
    each state."""

    def __init__(self, unique: str, request: ResponsesRequest, run: PromptRun, keep: Keep | None) -> None:
        """`keep`: None if the response is not to be stored."""
        self._run, self._keep = run, keep
        sampling = run.request.sampling
        self._head: dict[str, Any] = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._fields: dict[str, Any] = {
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": request.text_format},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def begun(self) -> dict[str, Any]:
        return self._object("in_progress", [])

    async def ended(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The object with its output, which is stored before the client gets it. A text that was cut makes it
        incomplete. `store` is false if the response could not be stored."""
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if self.was_cut else {}
        response = self._object(self.status, output, usage=self._usage(), **reason)
        if self._keep is not None:
            response["store"] = await self._keep(response)
        return response

    def failed(self, code: str, message: str) -> dict[str, Any]:
        return self._object("failed", [], error={"code": code, "message": message})

    @property
    def was_cut(self) -> bool:
        (choice,) = self._run.choices
        return choice.finish_reason == "length"

    @property
    def status(self) -> str:
        """Final status of the response, and of its last item."""
        return "incomplete" if self.was_cut else "completed"

    def _object(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        fields = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self._head, **fields, **self._fields, **more}

    def _usage(self) -> dict[str, Any]:
        (choice,) = self._run.choices
        num_prompt = len(self._run.request.prompt_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._run.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens or 0},
            "total_tokens": num_prompt + choice.num_tokens,
        }


class ResponseStream(EventFormat):
    """Every item and part has its `added`, `delta` and `done` events, numbered from 0."""

    done = b""

    def __init__(self, response: ResponseObject, run: PromptRun, output: OutputItems) -> None:
        self._response, self._output = response, output
        (self._choice,) = run.choices
        self._num_events = 0
        self._around_delta = b"", b""  # JSON before and after a delta of the open item
        self._end_steps: list[Step] = []
        self._ended: dict[str, Any] = {}

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        opening = b"" if self._num_events else self._start()
        return opening + self._events(self._output.feed(choice), "completed")

    async def finish(self) -> None:
        self._end_steps = list(self._output.end(self._choice))
        self._ended = await self._response.ended(self._output.fields(self._response.status))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        opening = b"" if self._num_events else self._start()
        kind = "response.incomplete" if self._response.was_cut else "response.completed"
        last = self._events(self._end_steps, self._response.status)
        return opening + last + self._event(kind, response=self._ended)

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.code is None else error.code
        return self._event("response.failed", response=self._response.failed(code, error.message))

    def _start(self) -> bytes:
        begun = self._response.begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _events(self, steps: Iterable[Step], status: str) -> bytes:
        """`status`: of an item that ends."""
        return b"".join([self._step(step, status) for step in steps])

    def _step(self, step: Step, status: str) -> bytes:
        kind, item, text, scores = step
        if kind == "text":
            return self._delta(item, text, scores)
        return self._begin(item) if kind == "begun" else self._item_end(item, status)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.head["id"], "output_index": self._output.items.index(item)}
        return place if item.type == "function_call" else {**place, "content_index": 0}

    def _begin(self, item: OutputItem) -> bytes:
        index = self._output.items.index(item)
        events = self._event("response.output_item.added", output_index=index, item=item.fields("in_progress"))
        kind, place = f"{EVENTS[item.type]}.delta", self._place(item)
        head = {"type": kind, **place, **({"logprobs": []} if item.type == "message" else {})}
        before = b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), orjson.dumps(head)[:-1])
        self._around_delta = before, b',"delta":'
        if (part := item.part("")) is None:
            return events
        return events + self._event("response.content_part.added", **place, part=part)

    def _delta(self, item: OutputItem, text: str, scores: list[Scores]) -> bytes:
        """Everything around the text of an event that brings nothing else is written once for each item."""
        if scores:
            return self._event(f"{EVENTS[item.type]}.delta", **self._place(item), delta=text, logprobs=scores)
        number, self._num_events = self._num_events, self._num_events + 1
        before, after = self._around_delta
        return b"%b%d%b%b}\n\n" % (before, number, after, orjson.dumps(text))

    def _item_end(self, item: OutputItem, status: str) -> bytes:
        place = self._place(item)
        events = self._event(f"{EVENTS[item.type]}.done", **place, **item.done_fields)
        if (part := item.part()) is not None:
            events += self._event("response.content_part.done", **place, part=part)
        index = place["output_index"]
        return events + self._event("response.output_item.done", output_index=index, item=item.fields(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        content = {"type": kind, "sequence_number": number, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(content))


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
