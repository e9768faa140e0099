"""Messages as server-sent events and as one JSON object."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay.text.choice import TOOL_CALLS, Choice
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.http.error_response import anthropic_error
from kvrelay_router.openai.answers.answer_format import AnswerFormat, DocumentFormat, EventFormat
from kvrelay_router.openai.chat_request import ChatRequest, arguments_of
from kvrelay_router.openai.generation import PromptRun

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def message_format(answer_id: str, request: ChatRequest, run: PromptRun) -> AnswerFormat:
    """Returns the format that the request asks for."""
    head = {"id": answer_id, "type": "message", "role": "assistant", "model": request.model}
    ending = MessageEnding(run, request.wanted_tokens or 0)
    return MessageStream(head, ending) if request.stream else MessageAnswer(head, ending, run.choices[0])


class MessageEnding:
    """Usage, and why the output ended. `asked_tokens`: the `max_tokens` of the request, for which the context may lack
    room."""

    def __init__(self, run: PromptRun, asked_tokens: int) -> None:
        self._run, self._asked_tokens = run, asked_tokens
        (self._choice,) = run.choices

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """Tokens that were read from the cache are not counted as input a second time."""
        cached = self._run.cached_tokens
        return {
            "input_tokens": len(self._run.request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.num_tokens if num_output_tokens is None else num_output_tokens,
        }

    def stop_fields(self) -> dict[str, Any]:
        choice = self._choice
        if choice.finish_reason == TOOL_CALLS:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if choice.finish_reason == "length":
            is_full = choice.num_tokens < self._asked_tokens
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


class MessageStream(EventFormat):
    """`head`: the first fields of the message."""

    life_sign = PING
    done = b""

    def __init__(self, head: dict[str, Any], ending: MessageEnding) -> None:
        super().__init__()
        self._head, self._ending = head, ending
        self._has_started = False
        self._num_blocks = 0
        self._open_type = ""  # type of the open block
        self._around_text = b"", b""  # JSON before and after the text of a delta

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        opening = b"" if self._has_started else self._start()
        return opening + b"".join(map(self._part, choice.take_events()))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the events after the last text."""
        events = b"" if self._has_started else self._start()
        events += self._close()
        events += event("message_delta", delta=self._ending.stop_fields(), usage=self._ending.usage())
        return events + event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(error)) + b"\n\n"

    def _start(self) -> bytes:
        self._has_started = True
        usage = self._ending.usage(0)
        unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", message={**self._head, **unfinished})

    def _part(self, part: Event) -> bytes:
        match part:
            case ContentText(text):
                return self._delta("text", "text_delta", "text", text)
            case ReasoningText(text):
                return self._delta("thinking", "thinking_delta", "thinking", text)
            case ToolCallBegun(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._open(block, "input_json_delta", "partial_json")
            case ArgumentsDelta(_, text):
                return b"".join((self._around_text[0], orjson.dumps(text), self._around_text[1]))
            case _:
                return self._close()

    def _delta(self, block_type: str, delta_type: str, field: str, text: str) -> bytes:
        """New text of a block of this type, which is opened first if another one is open."""
        opening = b""
        if self._open_type != block_type:
            signature = {"signature": ""} if block_type == "thinking" else {}
            opening = self._open({"type": block_type, field: "", **signature}, delta_type, field)
        return b"".join((opening, self._around_text[0], orjson.dumps(text), self._around_text[1]))

    def _open(self, block: dict[str, Any], delta_type: str, field: str) -> bytes:
        closing, ping = self._close(), b"" if self._num_blocks else PING
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        self._open_type = block["type"]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._around_text = head % (index, delta_type.encode(), field.encode()), b"}}\n\n"
        return closing + event("content_block_start", index=index, content_block=block) + ping

    def _close(self) -> bytes:
        kind, self._open_type = self._open_type, ""
        if not kind:
            return b""
        index, signing = self._num_blocks - 1, b""
        if kind == "thinking":  # clients send it back and expect one
            signature = {"type": "signature_delta", "signature": self._head["id"]}
            signing = event("content_block_delta", index=index, delta=signature)
        return signing + event("content_block_stop", index=index)


class MessageAnswer(DocumentFormat):
    """One JSON object."""

    def __init__(self, head: dict[str, Any], ending: MessageEnding, choice: Choice) -> None:
        self._head, self._ending, self._choice = head, ending, choice

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        content = self._content()
        return {**self._head, "content": content, **self._ending.stop_fields(), "usage": self._ending.usage()}

    def _content(self) -> list[dict[str, Any]]:
        blocks: list[tuple[dict[str, Any], list[str]]] = []
        for part in self._choice.take_events():
            match part:
                case ContentText(text):
                    _texts(blocks, {"type": "text"}).append(text)
                case ReasoningText(text):
                    _texts(blocks, {"type": "thinking", "signature": self._head["id"]}).append(text)
                case ToolCallBegun(_, call_id, name):
                    blocks.append(({"type": "tool_use", "id": call_id, "name": name}, []))
                case ArgumentsDelta(_, text):
                    blocks[-1][1].append(text)
        return [_block(block, "".join(texts)) for block, texts in blocks]


def _texts(blocks: list[tuple[dict[str, Any], list[str]]], block: dict[str, Any]) -> list[str]:
    """The texts of the last block, if that is of the same type, else of a new one."""
    if not blocks or blocks[-1][0]["type"] != block["type"]:
        blocks.append((block, []))
    return blocks[-1][1]


def _block(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    return {**block, "input": arguments_of(text)}


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event of Anthropic's API, whose name is also the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
