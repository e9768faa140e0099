"""Chat completions as server-sent events and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.text.choice import Choice, TokenRecords
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
from kvrelay_router.openai.answer_format import (
    TOKEN_IDS,
    CompletionsFormat,
    chat_logprobs,
    prompt_scores,
)
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import ChatRequest
from kvrelay_router.openai.generation import PromptRun

NO_DETAILS: dict[str, Any] = {"logprobs": None, "finish_reason": None}


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


class ChatFormat(CompletionsFormat):
    """Of one request, or of the requests of a batch, with one run each: a choice has the index of its conversation. A
    stream sends the role of each choice first, and then its text."""

    def __init__(
        self, service: ApiService, answer_id: str, requests: Sequence[ChatRequest], runs: Sequence[PromptRun]
    ) -> None:
        self._request = request = requests[0]
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head = service.answer_head(answer_id, kind, request.model)
        super().__init__(head, service.text.tokenizer, request, runs)
        self._echoed = [each.echoed for each in requests]
        self._has_details = request.logprobs or request.return_token_ids

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
            # OpenAI's client reports the last call as complete only if an earlier chunk began it. The last
            # chunk has the records of the tokens.
            details = {**self._details(TokenRecords()), "finish_reason": None}
            opening += self._event(run, _content(choice, fields, details))
            fields = {}
        records = choice.take_records()
        if "content" in fields and len(records.logprobs) > 1:
            # The text of all but the last token was withheld. They come first, as tokens without text, because clients
            # such as guidance take the content of a chunk for the text of its only token.
            last = records.take_last()
            details = {**self._details(records), "finish_reason": None}
            opening += self._event(run, _content(choice, {"content": ""}, details), len(records.token_ids))
            records = last
        ending = choice.ending if self._has_details or choice.finish_reason is not None else {"finish_reason": None}
        details = {**self._details(records), **ending}
        return opening + self._event(run, _content(choice, fields, details), len(records.token_ids))

    def _open(self, run: PromptRun, choice: Choice) -> bytes:
        self._opened.add(choice.index)
        if choice.is_plain and not self._has_details and not self._request.running_usage:
            # Events of this choice bring text alone until the last one, so everything around it is written once.
            before = b'{"index":%d,"delta":{"content":' % choice.index
            self._around_text[choice.index] = self._around(before, b'},"logprobs":null,"finish_reason":null}')
        prompt: dict[str, Any] = {}
        if self._request.return_token_ids:
            prompt["prompt_token_ids"] = run.request.prompt_ids
        role = {"role": "assistant", "content": ""}
        opening = self._event(run, _content(choice, role, NO_DETAILS), **prompt)
        if echoed := self._echoed[0]:
            opening += self._event(run, _content(choice, {"content": echoed}, NO_DETAILS))
        return opening

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        run, num_top = self._runs[0], self._request.prompt_logprobs
        answer: dict[str, Any] = {
            **self._head,
            "choices": [
                self._choice(choice, echoed)
                for run, echoed in zip(self._runs, self._echoed, strict=True)
                for choice in run.choices
            ],
            "usage": usage,
            # Batches have none.
            "prompt_logprobs": None if num_top is None else prompt_scores(self._tokenizer, num_top, run, run),
        }
        if self._request.return_token_ids and len(self._runs) == 1:
            answer["prompt_token_ids"] = run.request.prompt_ids
        return answer

    def _choice(self, choice: Choice, echoed: str) -> dict[str, Any]:
        details = self._details(choice.take_records())
        return {"index": choice.index, "message": _message(choice, echoed), **details, **choice.ending}

    def _details(self, records: TokenRecords) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs:
            texts = TOKEN_IDS if self._request.return_tokens_as_token_ids else self._tokenizer
            details["logprobs"] = chat_logprobs(
                texts, records.logprobs, self._request.top_logprobs, with_own=bool(self._request.logprob_token_ids)
            )
        if self._request.return_token_ids:
            details["token_ids"] = records.token_ids
        return details


def _content(choice: Choice, delta: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, **details}


def _message(choice: Choice, echoed: str) -> dict[str, Any]:
    fields = message_fields(choice.take_events())
    content = echoed + fields.pop("content", "")
    for call in fields.get("tool_calls", ()):
        del call["index"]
    # An empty answer is an empty text, but reasoning or calls may stand without one.
    return {"role": "assistant", "content": content or (None if fields else ""), "refusal": None, **fields}
