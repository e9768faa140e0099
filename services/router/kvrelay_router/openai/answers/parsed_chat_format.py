"""Chat completions with reasoning and tool calls, as server-sent events and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay_router.openai.answers.answer_format import AnswerFormat
from kvrelay_router.openai.answers.chat_format import ChatAnswer, ChatStream
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.answers.parsed_choices import ParsedChoices
from kvrelay_router.openai.answers.prompt_scores import PromptScores, prompt_scores
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.schema.chat_request import ChatRequest
from kvrelay_router.output_parsing.events import ArgumentsDelta, ContentText, Event, ReasoningText, ToolCallBegun
from kvrelay_router.text.tokenizer import Tokenizer


def chat_format(
    service: ApiService, answer_id: str, request: ChatRequest, runs: Sequence[PromptRun], parsed: ParsedChoices
) -> AnswerFormat:
    """Returns the format that the request asks for."""
    tokenizer = service.text.tokenizer
    if request.stream:
        head = service.answer_head(answer_id, "chat.completion.chunk", request.model)
        if parsed.is_plain:
            return ChatStream(head, tokenizer, request)
        return ParsedChatStream(head, tokenizer, request, parsed)
    head, scores = service.answer_head(answer_id, "chat.completion", request.model), prompt_scores(tokenizer, request)
    if parsed.is_plain:
        return ChatAnswer(head, tokenizer, request, runs, scores)
    return ParsedChatAnswer(head, tokenizer, request, runs, scores, parsed)


def reasoning_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Reasoning under both of its names: clients of SGLang and DeepSeek read the first one, of vLLM and OpenRouter the
    second one."""
    text = "".join(texts)
    return {"reasoning_content": text, "reasoning": text}


class Delta:
    """Joins the events of one chunk, or of a whole message."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    self.content.append(text)
                case ReasoningText(text):
                    self.reasoning.append(text)
                case ToolCallBegun(index, call_id, name):
                    self._call(index).update(id=call_id, type="function", function={"name": name})
                case ArgumentsDelta(index, text):
                    self._call(index).setdefault("function", {})
                    self._arguments.setdefault(index, []).append(text)

    def _call(self, index: int) -> dict[str, Any]:
        return self.calls.setdefault(index, {"index": index})

    def tool_calls(self) -> list[dict[str, Any]]:
        """All calls, in their order."""
        for index, call in self.calls.items():
            call["function"]["arguments"] = "".join(self._arguments.get(index, ()))
        return [self.calls[index] for index in sorted(self.calls)]

    def fields(self) -> dict[str, Any]:
        """The fields of a chunk's `delta`. Empty if there were no events."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields |= reasoning_fields(self.reasoning)
        if self.content:
            fields["content"] = "".join(self.content)
        if self.calls:
            fields["tool_calls"] = self.tool_calls()
        return fields


class ParsedChatStream(ChatStream):
    """All events that a piece of text decides go out in one chunk."""

    def __init__(self, head: dict[str, Any], tokenizer: Tokenizer, request: ChatRequest, parsed: ParsedChoices) -> None:
        super().__init__(head, tokenizer, request)
        self._parsed = parsed

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        delta = Delta()
        delta.add(self._parsed.events(choice, text))
        fields = delta.fields()
        opening = b"" if choice.index in self._opened else self._open(run, choice)
        if not fields and choice.finish_reason is None:
            return opening
        if "tool_calls" in fields and choice.finish_reason is not None:
            # OpenAI's client reports the last call as complete only if an earlier chunk began it.
            opening += self._event_without_tokens(run, choice, orjson.dumps(fields))
            fields = {}
        return self._event_with_details(run, choice, orjson.dumps(fields), opening)

    def _finish_reason(self, choice: Choice) -> str | None:
        return self._parsed.finish_reason(choice)


class ParsedChatAnswer(ChatAnswer):
    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        request: ChatRequest,
        runs: Sequence[PromptRun],
        scores: PromptScores | None,
        parsed: ParsedChoices,
    ) -> None:
        super().__init__(head, tokenizer, request, runs, scores)
        self._parsed = parsed
        self._messages: dict[int, Delta] = {}

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Keeps what the text says."""
        events = self._parsed.events(choice, text)
        self._messages.setdefault(choice.index, Delta()).add(events)
        return b""

    def _message(self, choice: Choice) -> dict[str, Any]:
        message = self._messages.get(choice.index, Delta())
        content = self._echoed(choice) + "".join(message.content)
        calls = [{name: call[name] for name in call if name != "index"} for call in message.tool_calls()]
        fields: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        if message.reasoning:
            fields |= reasoning_fields(message.reasoning)
        if calls:
            fields["tool_calls"] = calls
        elif not message.reasoning:
            fields["content"] = content
        return fields

    def _finish_reason(self, choice: Choice) -> str | None:
        return self._parsed.finish_reason(choice)
