"""Responses as server-sent events and as one JSON object."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, ReasoningText, ToolCallBegun, ToolCallEnded
from kvrelay.text.parsed_text import TokenKind
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.answer_format import AnswerFormat, chat_logprobs
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.response_store import Keep
from kvrelay_router.responses.responses_request import ResponsesRequest, namespaces


class ResponseFormat(AnswerFormat):
    """The response is the answer in one piece, and in a stream events carry it. There every item and part has its
    `added`, `delta` and `done` events, numbered from 0."""

    done = b""

    def __init__(
        self, unique: str, request: ResponsesRequest, run: PromptRun, tokenizer: Tokenizer, keep: Keep | None
    ) -> None:
        """`keep`: None if the response is not to be stored."""
        self.is_stream = request.stream
        self._run, self._keep = run, keep
        (self._choice,) = run.choices
        scores = TokenScores(tokenizer, request.top_logprobs if request.wants_logprobs else None)
        self._output = OutputItems(unique, scores, namespaces(request))
        self._num_events = 0
        self._around_delta = b"", b""  # JSON before and after a delta of the open item
        self._end_steps: list[Step] = []
        self._ended: dict[str, Any] = {}
        sampling = run.request.sampling
        self._fields: dict[str, Any] = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": int(time.time()),
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

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        return self._start() + self._events(self._output.feed(choice), "completed")

    async def finish(self) -> None:
        """Stores the response before the client gets it. A text that was cut makes it incomplete. `store` is false if
        it could not be stored."""
        self._end_steps = [*self._output.feed(self._choice), *self._output.end(self._choice)]
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if self._status == "incomplete" else {}
        output = self._output.fields(self._status)
        self._ended = self._object(self._status, output, usage=self._usage(), **reason)
        if self._keep is not None:
            self._ended["store"] = await self._keep(self._ended)

    def end(self, usage: dict[str, Any]) -> bytes:
        last = self._start() + self._events(self._end_steps, self._status)
        return last + self._event(f"response.{self._status}", response=self._ended)

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._ended

    def failure(self, error: ApiError) -> bytes:
        reason = {"code": "server_error" if error.code is None else error.code, "message": error.message}
        return self._event("response.failed", response=self._object("failed", [], error=reason))

    @property
    def _status(self) -> str:
        """Final status of the response, and of its last item."""
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _object(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        fields = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self._fields, **fields, **more}

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        num_prompt = len(self._run.request.prompt_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._run.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens or 0},
            "total_tokens": num_prompt + choice.num_tokens,
        }

    def _start(self) -> bytes:
        if self._num_events:
            return b""
        begun = self._object("in_progress", [])
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


Scores = dict[str, Any]
"""The log-probabilities of a token in the answer's form."""


class TokenScores:
    """The log-probabilities of an output, if they were asked for."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._kept: deque[tuple[TokenLogprobs, TokenKind]] = deque()

    def take(self, choice: Choice) -> list[Scores]:
        """Those of the next content in the answer's form. It ends where reasoning or a call begins."""
        if self._num_top is None:
            return []
        records = choice.take_records()
        kinds = records.kinds or [TokenKind.CONTENT] * len(records.logprobs)
        self._kept += zip(records.logprobs, kinds, strict=True)
        while self._kept and self._kept[0][1] is not TokenKind.CONTENT:
            self._kept.popleft()
        entries = []
        while self._kept and self._kept[0][1] is TokenKind.CONTENT:
            entries.append(self._kept.popleft()[0])
        found: list[Scores] = chat_logprobs(self._tokenizer, entries, self._num_top)["content"]
        return found


EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
"""The common part of the names of an item's delta and done events, by its type."""


class OutputItem:
    """A text, reasoning or a call. `head`: its fields that do not change, with its type."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self._scores: list[Scores] = []
        self._texts: list[str] = []

    @property
    def type(self) -> str:
        return str(self.head["type"])

    def add(self, text: str, scores: list[Scores]) -> None:
        self._texts.append(text)
        self._scores += scores

    def part(self, text: str | None = None) -> dict[str, Any] | None:
        """Its content part: as it is by now, or with another text and no log-probabilities. None for a call."""
        shown, scores = ("".join(self._texts), self._scores) if text is None else (text, [])
        if self.type == "message":
            return {"type": "output_text", "text": shown, "annotations": [], "logprobs": scores}
        return {"type": "reasoning_text", "text": shown} if self.type == "reasoning" else None

    @property
    def done_fields(self) -> dict[str, Any]:
        """The fields of the event after the last delta."""
        if (part := self.part()) is None:
            return {"arguments": "".join(self._texts), "name": self.head["name"]}
        return {name: part[name] for name in ("text", "logprobs") if name in part}

    def fields(self, status: str) -> dict[str, Any]:
        """The item as it is by now; without its text while it is in progress."""
        is_begun = status == "in_progress"
        if (part := self.part()) is None:
            return {**self.head, "status": status, "arguments": "" if is_begun else "".join(self._texts)}
        return {**self.head, "status": status, "content": [] if is_begun else [part]}


_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}),
    "reasoning": ("rs", {"summary": []}),
    "function_call": ("fc", {}),
}
"""The prefix of an item's id and the fields that all items of a type have."""

Step = tuple[Literal["begun", "text", "ended"], OutputItem, str, list[Scores]]


class OutputItems:
    """Collects the items of an output. Each step is reported once, so that a stream can write its event.

    `namespaces`: those of functions that are in one, by the functions' names.
    """

    def __init__(self, unique: str, scores: TokenScores, namespaces: Mapping[str, str]) -> None:
        self._unique, self._scores, self._namespaces = unique, scores, namespaces
        self._is_open = False
        self.items: list[OutputItem] = []

    def feed(self, choice: Choice) -> Iterator[Step]:
        """The steps that new text makes."""
        for part in choice.take_events():
            match part:
                case ContentText(content):
                    yield from self._text("message", content, self._scores.take(choice))
                case ReasoningText(content):
                    yield from self._text("reasoning", content, [])
                case ToolCallBegun(_, call_id, name):
                    namespace = {"namespace": self._namespaces[name]} if name in self._namespaces else {}
                    yield from self._begin("function_call", call_id=call_id, name=name, **namespace)
                case ArgumentsDelta(_, arguments):
                    yield from self._text("function_call", arguments, [])
                case ToolCallEnded():
                    yield from self._end()

    def end(self, choice: Choice) -> Iterator[Step]:
        """The steps after the last text. An output without any is an empty text."""
        if not self.items:
            yield from self._begin("message")
        if self._is_in("message"):
            self.items[-1].add("", self._scores.take(choice))
        yield from self._end()

    def fields(self, last_status: str) -> list[dict[str, Any]]:
        """All items at the end. Only the last one may be incomplete."""
        return [item.fields("completed" if item is not self.items[-1] else last_status) for item in self.items]

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self.items[-1].type == kind

    def _text(self, kind: str, text: str, scores: list[Scores]) -> Iterator[Step]:
        if not self._is_in(kind):
            yield from self._begin(kind)
        item = self.items[-1]
        item.add(text, scores)
        yield "text", item, text, scores

    def _begin(self, kind: str, **head: Any) -> Iterator[Step]:
        yield from self._end()
        prefix, own = _HEADS[kind]
        number = f"_{len(self.items)}" if self.items else ""
        head = {"id": f"{prefix}_{self._unique}{number}", "type": kind, **own, **head}
        self.items.append(OutputItem(head))
        self._is_open = True
        yield "begun", self.items[-1], "", []

    def _end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "ended", self.items[-1], "", []
