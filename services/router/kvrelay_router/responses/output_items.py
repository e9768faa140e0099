"""The output items of a response: texts, reasoning and calls, in the order in which the model writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice
from kvrelay.text.output_parsing.events import (
    ArgumentsDelta,
    ContentText,
    ReasoningText,
    ToolCallBegun,
    ToolCallEnded,
)
from kvrelay.text.parsed_text import TokenKind
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.answers.logprob_format import chat_logprobs

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
