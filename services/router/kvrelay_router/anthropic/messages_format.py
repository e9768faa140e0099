"""Messages as server-sent events and as one JSON object."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay.text.choice import TOOL_CALLS, Choice
from kvrelay.text.output_parsing.argument_values import is_json_object
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.anthropic.messages_request import MODELS_PREFIX
from kvrelay_router.http.error_response import anthropic_error
from kvrelay_router.openai.answer_format import AnswerFormat
from kvrelay_router.openai.chat_request import ChatRequest
from kvrelay_router.openai.generation import PromptRun

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
"""The type of a block's deltas, and the field with their text."""


class MessageFormat(AnswerFormat):
    life_sign = PING
    done = b""

    def __init__(self, answer_id: str, request: ChatRequest, run: PromptRun) -> None:
        self.is_stream = request.stream
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": request.model}
        self._run, self._asked_tokens = run, request.wanted_tokens or 0  # may exceed the context's room
        (self._choice,) = run.choices
        self._has_started = False
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []  # each with its texts, which a stream does not keep
        self._is_open = False  # the last block
        self._around_text = b"", b""  # JSON before and after the text of a delta

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        return self._start() + b"".join(map(self._part, choice.take_events()))

    def end(self, usage: dict[str, Any]) -> bytes:
        events = self._start() + self._close()
        events += event("message_delta", delta=self._stop_fields(), usage=self._usage())
        return events + event("message_stop")

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        for part in self._choice.take_events():
            self._part(part)
        content = [self._content(block, "".join(texts)) for block, texts in self._blocks]
        return {**self._head, "content": content, **self._stop_fields(), "usage": self._usage()}

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(error)) + b"\n\n"

    def _start(self) -> bytes:
        if self._has_started:
            return b""
        self._has_started = True
        unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return event("message_start", message={**self._head, **unfinished, "usage": self._usage(0)})

    def _part(self, part: Event) -> bytes:
        match part:
            case ContentText(text):
                return self._text({"type": "text", "text": ""}, text)
            case ReasoningText(text):
                return self._text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case ToolCallBegun(_, call_id, name):
                return self._open({"type": "tool_use", "id": _shown(call_id), "name": name, "input": {}})
            case ArgumentsDelta(_, text):
                return self._delta(text)
            case _:
                return self._close()

    def _text(self, block: dict[str, Any], text: str) -> bytes:
        """New text of a block of this type, which is opened first if another one is open."""
        is_open = self._is_open and self._blocks[-1][0]["type"] == block["type"]
        opening = b"" if is_open else self._open(block)
        return opening + self._delta(text)

    def _delta(self, text: str) -> bytes:
        if not self.is_stream:
            self._blocks[-1][1].append(text)
        return b"".join((self._around_text[0], orjson.dumps(text), self._around_text[1]))

    def _open(self, block: dict[str, Any]) -> bytes:
        closing, index = self._close(), len(self._blocks)
        self._blocks.append((block, []))
        self._is_open = True
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._around_text = head % (index, *_DELTAS[block["type"]]), b"}}\n\n"
        opening = event("content_block_start", index=index, content_block=block)
        return closing + opening + (b"" if index else PING)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        index, signing = len(self._blocks) - 1, b""
        if self._blocks[-1][0]["type"] == "thinking":  # clients send it back and expect one
            signature = {"type": "signature_delta", "signature": self._head["id"]}
            signing = event("content_block_delta", index=index, delta=signature)
        return signing + event("content_block_stop", index=index)

    def _usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """Tokens that were read from the cache are not counted as input a second time."""
        cached = self._run.cached_tokens
        return {
            "input_tokens": len(self._run.request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.num_tokens if num_output_tokens is None else num_output_tokens,
        }

    def _stop_fields(self) -> dict[str, Any]:
        choice, sequence = self._choice, None
        if choice.finish_reason == TOOL_CALLS:
            reason = "tool_use"
        elif choice.finish_reason == "length":
            is_full = choice.num_tokens < self._asked_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _content(self, block: dict[str, Any], text: str) -> dict[str, Any]:
        """A block of the answer in one piece."""
        match block["type"]:
            case "tool_use":
                # As the model wrote it: numbers may have more digits than can be read and written again.
                is_object = is_json_object(text := text or "{}")
                return {**block, "input": orjson.Fragment(text) if is_object else {"arguments": text}}
            case "thinking":
                return {**block, "thinking": text, "signature": self._head["id"]}
            case kind:
                return {**block, kind: text}


def _shown(call_id: str) -> str:
    """The id of a call in the form of Anthropic's API."""
    own = call_id.removeprefix("call_")
    return f"toolu_{own}" if own != call_id else MODELS_PREFIX + call_id


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event of Anthropic's API, whose name is also the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
