"""Responses as server-sent events and as one JSON object."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.answers.answer_format import CollectedTexts, DocumentFormat, EventFormat
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.answers.logprob_format import chat_logprobs
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.response_object import ResponseObject
from kvrelay_router.text.tokenizer import Tokenizer


class TokenScores:
    """The log-probabilities of an output, if they were asked for."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self.are_wanted = num_top is not None

    def take(self, choice: Choice) -> list[dict[str, Any]]:
        """Those of all tokens since the last call."""
        if self._num_top is None:
            return []
        entries = choice.take_records().logprobs
        scores: list[dict[str, Any]] = chat_logprobs(self._tokenizer, entries, self._num_top)["content"].all()
        return scores


class MessageItem:
    """The output item with the text."""

    def __init__(self, unique: str) -> None:
        self.id = f"msg_{unique}"
        self._texts: list[str] = []
        self._scores: list[dict[str, Any]] = []

    def add(self, text: str, scores: list[dict[str, Any]]) -> None:
        self._texts.append(text)
        self._scores += scores

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begun(self) -> dict[str, Any]:
        return self._item("in_progress", [])

    def ended(self, status: str) -> dict[str, Any]:
        return self._item(status, [self.part()])

    def part(self) -> dict[str, Any]:
        """The content part as it is by now."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._scores}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class ResponseStream(EventFormat):
    """Every item and part has its `added`, `delta` and `done` events, numbered from 0."""

    done = b""

    def __init__(self, response: ResponseObject, run: PromptRun, scores: TokenScores) -> None:
        self._response, self._run, self._scores = response, run, scores
        self._num_events = 0
        self._item: MessageItem | None = None
        self._around_delta = b"", b""

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Returns the events for new text."""
        opening = b"" if self._num_events else self._start()
        if not text:
            return opening
        if self._item is None:
            self._item, events = self._open()
            opening += events
        if self._scores.are_wanted:
            return opening + self._scored_delta(self._item, choice, text)
        self._item.add(text, [])
        number, self._num_events = self._num_events, self._num_events + 1
        before, after = self._around_delta
        return b"%b%b%d%b%b}\n\n" % (opening, before, number, after, orjson.dumps(text))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        events = b"" if self._num_events else self._start()
        if self._item is None:
            self._item, opening = self._open()
            events += opening
        self._item.add("", self._scores.take(self._run.choices[0]))
        item = self._item.ended(self._response.status)
        events += self._end_item(self._item, item)
        kind = "response.incomplete" if self._response.was_cut else "response.completed"
        return events + self._event(kind, response=self._response.ended([item]))

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.code is None else error.code
        return self._event("response.failed", response=self._response.failed(code, error.message))

    def _start(self) -> bytes:
        begun = self._response.begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _open(self) -> tuple[MessageItem, bytes]:
        item = MessageItem(self._response.unique)
        place = {"item_id": item.id, "output_index": 0, "content_index": 0}
        head = orjson.dumps({"type": "response.output_text.delta", **place, "logprobs": []})[:-1]
        self._around_delta = (
            b'event: response.output_text.delta\ndata: %b,"sequence_number":' % head,
            b',"delta":',
        )
        events = self._event("response.output_item.added", output_index=0, item=item.begun())
        return item, events + self._event("response.content_part.added", **place, part=item.part())

    def _scored_delta(self, item: MessageItem, choice: Choice, text: str) -> bytes:
        scores = self._scores.take(choice)
        item.add(text, scores)
        place = {"item_id": item.id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=text, logprobs=scores)

    def _end_item(self, item: MessageItem, ended: dict[str, Any]) -> bytes:
        place = {"item_id": item.id, "output_index": 0, "content_index": 0}
        part = item.part()
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=ended),
            )
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            orjson.dumps({"type": kind, "sequence_number": number, **fields}),
        )


class ResponseAnswer(DocumentFormat):
    """One JSON object."""

    def __init__(self, response: ResponseObject, run: PromptRun, scores: TokenScores) -> None:
        self._response, self._run, self._scores = response, run, scores
        self._texts = CollectedTexts()

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Keeps the text."""
        self._texts.add(choice, text)
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = self._run.choices
        item = MessageItem(self._response.unique)
        item.add(self._texts.of(choice), self._scores.take(choice))
        return self._response.ended([item.ended(self._response.status)])
