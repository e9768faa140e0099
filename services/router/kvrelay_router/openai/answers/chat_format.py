"""Chat completions as server-sent events and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice, TokenRecords
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.answers.answer_format import (
    AnswerFormat,
    ChunkWriter,
    DocumentFormat,
    EventFormat,
)
from kvrelay_router.openai.answers.logprob_format import TOKEN_IDS, chat_logprobs, prompt_scores
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import ChatRequest
from kvrelay_router.openai.generation import PromptRun

NO_DETAILS: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def chat_format(
    service: ApiService, answer_id: str, requests: Sequence[ChatRequest], runs: Sequence[PromptRun]
) -> AnswerFormat:
    """Returns the format that the requests ask for. Several are the conversations of a batch, with one run each."""
    tokenizer, request = service.text.tokenizer, requests[0]
    if request.stream:
        return ChatStream(service.answer_head(answer_id, "chat.completion.chunk", request.model), tokenizer, request)
    head = service.answer_head(answer_id, "chat.completion", request.model)
    return ChatAnswer(head, tokenizer, requests, runs)


def message_fields(events: Sequence[Event]) -> dict[str, Any]:
    """The fields of a chunk's `delta`, or of a whole message. Empty if there were no events.

    Reasoning has two names: clients of SGLang and DeepSeek read the first one, of vLLM and OpenRouter the second one.
    """
    content = [each.text for each in events if isinstance(each, ContentText)]
    reasoning = [each.text for each in events if isinstance(each, ReasoningText)]
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ToolCallBegun(index, call_id, name):
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": {"name": name}}
            case ArgumentsDelta(index, text):
                calls.setdefault(index, {"index": index, "function": {}})
                arguments.setdefault(index, []).append(text)
    for index, call in calls.items():
        call["function"]["arguments"] = "".join(arguments.get(index, ()))
    fields: dict[str, Any] = {}
    if reasoning:
        fields |= dict.fromkeys(("reasoning_content", "reasoning"), "".join(reasoning))
    if content:
        fields["content"] = "".join(content)
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


class ChatStream(EventFormat):
    """Sends the role of each choice first, and then its text. `head`: the fields that all events begin with."""

    def __init__(self, head: dict[str, Any], tokenizer: Tokenizer, request: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._chunks = ChunkWriter(head, request)
        self._has_details = request.logprobs or request.return_token_ids
        self._opened: set[int] = set()
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # see `_open`

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        """All that a piece of text decides goes out in one chunk."""
        around = self._around_text.get(choice.index)
        if around is not None and choice.finish_reason is None:
            text = choice.take_text()
            return b"".join((around[0], orjson.dumps(text), around[1])) if text else b""
        fields = message_fields(choice.take_events())
        opening = b"" if choice.index in self._opened else self._open(run, choice)
        if not fields and choice.finish_reason is None:
            return opening
        if "tool_calls" in fields and choice.finish_reason is not None:
            # OpenAI's client reports the last call as complete only if an earlier chunk began it. The tokens are left
            # to the last one.
            details = {**self._details(TokenRecords()), "finish_reason": None}
            opening += self._chunks.event(run, _content(choice, fields, details))
            fields = {}
        records = choice.take_records()
        ending = choice.ending if self._has_details or choice.finish_reason is not None else {"finish_reason": None}
        details = {**self._details(records), **ending}
        return opening + self._chunks.event(run, _content(choice, fields, details), len(records.token_ids))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the event with the usage, if it was asked for."""
        return self._chunks.last_event(usage)

    def _open(self, run: PromptRun, choice: Choice) -> bytes:
        self._opened.add(choice.index)
        if choice.is_plain and not self._has_details and not self._request.running_usage:
            # Events of this choice bring text alone until the last one, so everything around it is written once.
            before = b'{"index":%d,"delta":{"content":' % choice.index
            self._around_text[choice.index] = self._chunks.around(before, b'},"logprobs":null,"finish_reason":null}')
        prompt: dict[str, Any] = {}
        if self._request.return_token_ids:
            prompt["prompt_token_ids"] = run.request.prompt_ids
        role = {"role": "assistant", "content": ""}
        opening = self._chunks.event(run, _content(choice, role, NO_DETAILS), **prompt)
        if echoed := self._request.echoed:
            opening += self._chunks.event(run, _content(choice, {"content": echoed}, NO_DETAILS))
        return opening

    def _details(self, records: TokenRecords) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": _logprobs(self._tokenizer, self._request, records.logprobs)}
        return {**details, "token_ids": records.token_ids} if self._request.return_token_ids else details


def _content(choice: Choice, delta: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, **details}


class ChatAnswer(DocumentFormat):
    """One JSON object with all choices. The index of a choice is that of its conversation if there are several."""

    def __init__(
        self, head: dict[str, Any], tokenizer: Tokenizer, requests: Sequence[ChatRequest], runs: Sequence[PromptRun]
    ) -> None:
        self._head, self._tokenizer = head, tokenizer
        self._request, self._runs = requests[0], runs
        self._echoed = [request.echoed for request in requests]

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {
            **self._head,
            "choices": [
                self._choice(choice, echoed)
                for run, echoed in zip(self._runs, self._echoed, strict=True)
                for choice in run.choices
            ],
            "usage": usage,
        }
        if len(self._runs) > 1:
            return answer
        (run,) = self._runs
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = run.request.prompt_ids
        if (num_top := self._request.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = prompt_scores(self._tokenizer, num_top, run, run)
        return answer

    def _choice(self, choice: Choice, echoed: str) -> dict[str, Any]:
        records = choice.take_records()
        content: dict[str, Any] = {
            "index": choice.index,
            "message": _message(choice, echoed),
            "logprobs": _logprobs(self._tokenizer, self._request, records.logprobs),
            **choice.ending,
        }
        if self._request.return_token_ids:
            content["token_ids"] = records.token_ids
        return content


def _message(choice: Choice, echoed: str) -> dict[str, Any]:
    fields = message_fields(choice.take_events())
    content = echoed + fields.pop("content", "")
    for call in fields.get("tool_calls", ()):
        del call["index"]
    # An empty answer is an empty text, but reasoning or calls may stand without one.
    return {"role": "assistant", "content": content or (None if fields else ""), "refusal": None, **fields}


def _logprobs(tokenizer: Tokenizer, request: ChatRequest, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    texts = TOKEN_IDS if request.return_tokens_as_token_ids else tokenizer
    return chat_logprobs(texts, entries, request.top_logprobs)
