"""The output items of a response: texts, reasoning and calls, in the order in which the model writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.http.json_parts import Rows
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.answers.logprob_format import are_large, chat_logprobs
from kvrelay_router.openai.answers.parsed_text import TokenKind
from kvrelay_router.output_parsing.events import (
    ArgumentsDelta,
    ContentText,
    ReasoningText,
    ToolCallBegun,
    ToolCallEnded,
)
from kvrelay_router.text.tokenizer import Tokenizer


class TokenScores:
    """The log-probabilities of an output, if they were asked for."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._kept: deque[tuple[TokenLogprobs, TokenKind]] = deque()

    def rows(self, entries: list[TokenLogprobs]) -> Rows:
        """The log-probabilities in the answer's form. Each is made when it is written."""
        rows: Rows = chat_logprobs(self._tokenizer, entries, self._num_top or 0)["content"]
        return rows

    def are_large(self, num_entries: int) -> bool:
        """True if so many are to be written in parts."""
        return are_large(num_entries, self._num_top or 0)

    def take(self, choice: Choice) -> list[TokenLogprobs]:
        """Those of the next content, which ends where reasoning or a call begins."""
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
        return entries


class OutputItem(ABC):
    """`events` is the common part of the names of its delta and done events. `has_part`: its text is a content part."""

    events: str
    has_part = True

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._texts: list[str] = []

    def add(self, text: str, scores: list[TokenLogprobs]) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def part(self) -> dict[str, Any]:
        """Its content part as it is by now, if it has one."""
        raise NotImplementedError

    @property
    def empty_part(self) -> dict[str, Any]:
        """Its content part before any text."""
        empty: dict[str, Any] = {"text": "", "logprobs": []}
        return {name: empty.get(name, value) for name, value in self.part.items()}

    @property
    def done_fields(self) -> dict[str, Any]:
        """The fields of the event after the last delta."""
        return {"text": self.text}

    @abstractmethod
    def fields(self, status: str) -> dict[str, Any]:
        """The item as it is by now."""


class MessageItem(OutputItem):
    events = "response.output_text"

    def __init__(self, unique: str, scores: TokenScores) -> None:
        super().__init__(f"msg_{unique}")
        self.entries: list[TokenLogprobs] = []
        self._scores = scores

    def add(self, text: str, scores: list[TokenLogprobs]) -> None:
        super().add(text, scores)
        self.entries += scores

    @property
    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._scores.rows(self.entries),
        }

    @property
    def done_fields(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self._scores.rows(self.entries)}

    def fields(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class ReasoningItem(OutputItem):
    events = "response.reasoning_text"

    def __init__(self, unique: str) -> None:
        super().__init__(f"rs_{unique}")

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def fields(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part]
        return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": content}


class CallItem(OutputItem):
    events = "response.function_call_arguments"
    has_part = False

    def __init__(self, unique: str, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(f"fc_{unique}")
        self._call = {"call_id": call_id, "name": name}
        if namespace is not None:
            self._call["namespace"] = namespace

    @property
    def done_fields(self) -> dict[str, Any]:
        return {"arguments": self.text, "name": self._call["name"]}

    def fields(self, status: str) -> dict[str, Any]:
        arguments = "" if status == "in_progress" else self.text
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": arguments}


Step = tuple[Literal["begun", "text", "ended"], OutputItem, str, list[TokenLogprobs]]


class OutputItems:
    """Collects the items of an output. Each step is reported once, so that a stream can write its event.

    `namespaces`: those of functions that are in one, by the functions' names.
    """

    def __init__(self, unique: str, scores: TokenScores, namespaces: Mapping[str, str]) -> None:
        self._unique, self.scores, self._namespaces = unique, scores, namespaces
        self._is_open = False
        self.items: list[OutputItem] = []

    def feed(self, choice: Choice) -> Iterator[Step]:
        """The steps that new text makes."""
        for part in choice.take_events():
            match part:
                case ContentText(content):
                    if not self._is_in(MessageItem):
                        yield from self._begin(MessageItem(self._new_id(), self.scores))
                    yield self._add(content, self.scores.take(choice))
                case ReasoningText(content):
                    if not self._is_in(ReasoningItem):
                        yield from self._begin(ReasoningItem(self._new_id()))
                    yield self._add(content, [])
                case ToolCallBegun(_, call_id, name):
                    yield from self._begin(CallItem(self._new_id(), call_id, name, self._namespaces.get(name)))
                case ArgumentsDelta(_, arguments):
                    yield self._add(arguments, [])
                case ToolCallEnded():
                    yield from self._end()

    def end(self, choice: Choice) -> Iterator[Step]:
        """The steps after the last text. An output without any is an empty text."""
        if not self.items:
            yield from self._begin(MessageItem(self._new_id(), self.scores))
        if self._is_in(MessageItem):
            self.items[-1].add("", self.scores.take(choice))
        yield from self._end()

    @property
    def are_large(self) -> bool:
        """True if the events that repeat the output are to be written in parts."""
        return self.scores.are_large(sum(len(each.entries) for each in self.items if isinstance(each, MessageItem)))

    def fields(self, last_status: str) -> list[dict[str, Any]]:
        """All items at the end. Only the last one may be incomplete."""
        return [item.fields("completed" if item is not self.items[-1] else last_status) for item in self.items]

    def _new_id(self) -> str:
        return f"{self._unique}_{len(self.items)}" if self.items else self._unique

    def _is_in(self, kind: type[OutputItem]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _add(self, text: str, scores: list[TokenLogprobs]) -> Step:
        item = self.items[-1]
        item.add(text, scores)
        return "text", item, text, scores

    def _begin(self, item: OutputItem) -> Iterator[Step]:
        yield from self._end()
        self.items.append(item)
        self._is_open = True
        yield "begun", item, "", []

    def _end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "ended", self.items[-1], "", []
