"""Reasoning between `<think>` and `</think>` before the content, as most models write it."""

from __future__ import annotations

from kvrelay_router.output_parsing.events import Event, OutputParser, ReasoningText
from kvrelay_router.output_parsing.text_parser import Markers, Steps, TextParser


class ThinkingParser(TextParser):
    """Passes the text behind the reasoning to another parser.

    `begins_inside`: the prompt has opened the reasoning. Otherwise an output without `begin` has none. Whitespace
    around the reasoning is dropped.
    """

    def __init__(self, inner: OutputParser, *, begin: str, end: str, begins_inside: bool) -> None:
        super().__init__()
        self._inner = inner
        self._begin, self._ends = begin, Markers(end)
        self._begins_inside = begins_inside
        self._is_behind = False

    def feed(self, text: str) -> list[Event]:
        return self._inner.feed(text) if self._is_behind else super().feed(text)

    def finish(self) -> list[Event]:
        return [*([] if self._is_behind else super().finish()), *self._inner.finish()]

    def _parse(self) -> Steps[None]:
        self._head = []
        yield from self._skip_spaces()
        opens = yield from self._skip(self._begin)
        if opens or self._begins_inside:
            yield from self._skip_spaces()
            self._head = []
            ended = yield from self._until(self._ends, self._reasoning)
            if ended is None:
                if self._spaces:
                    self._events.append(ReasoningText(self._take_spaces()))
            else:
                yield from self._skip_spaces()
            self._head, self._spaces = [], []
        self._is_behind = True
        self._events += self._inner.feed("".join(self._head) + self._take_rest())

    def _reasoning(self, text: str) -> None:
        if kept := self._without_end(text):
            self._events.append(ReasoningText(kept))
