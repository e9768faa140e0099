"""Messages as server-sent events and as one JSON object."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.answers.answer_format import AnswerFormat, CollectedTexts, DocumentFormat, EventFormat
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.anthropic_errors import anthropic_error
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.schema.chat_request import ChatRequest

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
NEW_TEXT = {"type": "text", "text": ""}


def message_format(answer_id: str, request: ChatRequest, run: PromptRun) -> AnswerFormat:
    """Returns the format that the request asks for."""
    head = {"id": answer_id, "type": "message", "role": "assistant", "model": request.model}
    format_class = MessageStream if request.stream else MessageAnswer
    return format_class(head, run, request.wanted_tokens or 0)


def message_usage(run: PromptRun, num_output_tokens: int) -> dict[str, Any]:
    """Tokens that were read from the cache are not counted as input a second time."""
    cached = run.cached_tokens
    return {
        "input_tokens": len(run.request.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_output_tokens,
    }


def stop_fields(run: PromptRun, asked_tokens: int) -> dict[str, Any]:
    """Why the output ended. `asked_tokens`: the `max_tokens` of the request, for which the context may lack room."""
    (choice,) = run.choices
    if choice.finish_reason == "length":
        is_full = choice.num_tokens < asked_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class MessageStream(EventFormat):
    """`head`: the first fields of the message."""

    life_sign = PING
    done = b""

    def __init__(self, head: dict[str, Any], run: PromptRun, asked_tokens: int) -> None:
        self._head, self._run, self._asked_tokens = head, run, asked_tokens
        self._has_started = False
        self._num_blocks = 0
        self._around_text = b"", b""  # of the events of the open block

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Returns the events for new text."""
        opening = b"" if self._has_started else self._start()
        if not text:
            return opening
        if not self._num_blocks:
            opening += self._open_text() + PING
        return b"".join((opening, self._around_text[0], orjson.dumps(text), self._around_text[1]))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        (choice,) = self._run.choices
        events = b"" if self._has_started else self._start()
        if self._num_blocks:
            events += event("content_block_stop", index=self._num_blocks - 1)
        delta = stop_fields(self._run, self._asked_tokens)
        events += event("message_delta", delta=delta, usage=message_usage(self._run, choice.num_tokens))
        return events + event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(error)) + b"\n\n"

    def _start(self) -> bytes:
        self._has_started = True
        usage = message_usage(self._run, 0)
        unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", message={**self._head, **unfinished})

    def _open_text(self) -> bytes:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        before = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % index
        self._around_text = before + b'"delta":{"type":"text_delta","text":', b"}}\n\n"
        return event("content_block_start", index=index, content_block=NEW_TEXT)


class MessageAnswer(DocumentFormat):
    """One JSON object."""

    def __init__(self, head: dict[str, Any], run: PromptRun, asked_tokens: int) -> None:
        self._head, self._run, self._asked_tokens = head, run, asked_tokens
        self._texts = CollectedTexts()

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Keeps the text."""
        self._texts.add(choice, text)
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = self._run.choices
        text = self._texts.of(choice)
        return {
            **self._head,
            "content": [{"type": "text", "text": text}] if text else [],
            **stop_fields(self._run, self._asked_tokens),
            "usage": message_usage(self._run, choice.num_tokens),
        }


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event of Anthropic's API, whose name is also the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
