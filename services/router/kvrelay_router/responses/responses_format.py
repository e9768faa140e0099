"""Responses as server-sent events and as one JSON object, with their items: texts, reasoning and calls."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
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
        self._scores = TokenScores(tokenizer, request.top_logprobs if request.wants_logprobs else None)
        self._unique, self._namespaces = unique, namespaces(request)
        self._items: list[OutputItem] = []
        self._is_open = False  # the last item
        self._num_events = 0
        self._around_delta = b"", b""  # JSON before and after a delta of the open item
        self._last_events = b""
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
        return self._start() + b"".join(map(self._part, choice.take_events()))

    async def finish(self) -> None:
        """Stores the response before the client gets it. A text that was cut makes it incomplete, and an output without
        any is an empty text. `store` is false if it could not be stored."""
        self._last_events = self.add(self._run, self._choice)
        if not self._items:
            self._last_events += self._begin("message")
        if self._is_in("message"):
            self._items[-1].add("", self._scores.take(self._choice))
        self._last_events += self._end_item(self._status)
        output = [item.fields("completed") for item in self._items[:-1]] + [self._items[-1].fields(self._status)]
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if self._status == "incomplete" else {}
        self._ended = self._object(self._status, output, usage=self._usage(), **reason)
        if self._keep is not None:
            self._ended["store"] = await self._keep(self._ended)

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._last_events + self._event(f"response.{self._status}", response=self._ended)

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

    def _part(self, part: Event) -> bytes:
        match part:
            case ContentText(text):
                return self._text("message", text, self._scores.take(self._choice))
            case ReasoningText(text):
                return self._text("reasoning", text, [])
            case ToolCallBegun(_, call_id, name):
                namespace = {"namespace": self._namespaces[name]} if name in self._namespaces else {}
                return self._begin("function_call", call_id=call_id, name=name, **namespace)
            case ArgumentsDelta(_, text):
                return self._text("function_call", text, [])
            case _:
                return self._end_item("completed")

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._items[-1].type == kind

    def _text(self, kind: str, text: str, scores: list[Scores]) -> bytes:
        """New text of an item of this type, which is begun first if another one is open."""
        opening = b"" if self._is_in(kind) else self._begin(kind)
        item = self._items[-1]
        item.add(text, scores)
        if scores or not self.is_stream:
            return opening + self._event(f"{EVENTS[kind]}.delta", **self._place(item), delta=text, logprobs=scores)
        number, self._num_events = self._num_events, self._num_events + 1
        before, after = self._around_delta
        return b"%b%b%d%b%b}\n\n" % (opening, before, number, after, orjson.dumps(text))

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.head["id"], "output_index": len(self._items) - 1}
        return place if item.type == "function_call" else {**place, "content_index": 0}

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """Everything around the text of an event that brings nothing else is written once for each item."""
        events, index = self._end_item("completed"), len(self._items)
        prefix, own = _HEADS[kind]
        number = f"_{index}" if index else ""
        item = OutputItem({"id": f"{prefix}_{self._unique}{number}", "type": kind, **own, **fields})
        self._items.append(item)
        self._is_open = True
        events += self._event("response.output_item.added", output_index=index, item=item.fields("in_progress"))
        delta, place = f"{EVENTS[kind]}.delta", self._place(item)
        head = {"type": delta, **place, **({"logprobs": []} if kind == "message" else {})}
        before = b'event: %b\ndata: %b,"sequence_number":' % (delta.encode(), orjson.dumps(head)[:-1])
        self._around_delta = before, b',"delta":'
        if (part := item.part("")) is None:
            return events
        return events + self._event("response.content_part.added", **place, part=part)

    def _end_item(self, status: str) -> bytes:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open, item = False, self._items[-1]
        place, index = self._place(item), len(self._items) - 1
        events = self._event(f"{EVENTS[item.type]}.done", **place, **item.done_fields)
        if (part := item.part()) is not None:
            events += self._event("response.content_part.done", **place, part=part)
        return events + self._event("response.output_item.done", output_index=index, item=item.fields(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self.is_stream:
            return b""
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
