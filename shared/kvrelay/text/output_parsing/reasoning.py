"""Reasoning between two markers, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.text.output_parsing.events import ContentText, Event, OutputParser, ReasoningText
from kvrelay.text.output_parsing.parser_base import Markers, Steps, TextParser


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
        is_inside, read = yield from self._beginning()
        if is_inside:
            yield from self._skip_spaces()
            ended = yield from self._until(self._ends, self._reasoning)
            if ended is not None:
                yield from self._skip_spaces()
            elif self._spaces:
                self._events.append(ReasoningText(self._take_spaces()))
            self._spaces, read = [], ""
        self._pass_inside(read)

    def _beginning(self) -> Steps[tuple[bool, str]]:
        """Returns whether the output begins with reasoning, and the text that was read to know it."""
        self._begin_head()
        yield from self._skip_spaces()
        opens = yield from self._skip(self._begin)
        read = self._head_text()
        self._drop_head()
        return opens or self._begins_inside, read

    def _pass_inside(self, read: str) -> None:
        self._is_behind = True
        self._events += self._inner.feed(read + self._take_rest())

    def _reasoning(self, text: str) -> None:
        if kept := self._without_end(text):
            self._events.append(ReasoningText(kept))


class JoinedThinkingParser(ThinkingParser):
    """The same with the reasoning and its markers as content, as the model writes them."""

    def _parse(self) -> Steps[None]:
        is_inside, read = yield from self._beginning()
        if is_inside:
            self._joined(read)
            self._joined((yield from self._until(self._ends, self._joined)) or "")
            read = ""
        self._pass_inside(read)

    def _joined(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))


class ReasoningCounter:
    """`num_tokens`: those of the reasoning so far, with the tokens that begin and end it."""

    def __init__(self, begin_id: int, end_id: int, *, begins_inside: bool) -> None:
        self.num_tokens = 0
        self._begin_id, self._end_id = begin_id, end_id
        self._num_seen = 0
        self._is_inside = begins_inside
        self._is_behind = False

    def count(self, token_ids: Sequence[int]) -> None:
        if self._is_behind:
            return
        if not self._is_inside and self._begin_id in token_ids:
            self._is_inside = True
        if not self._is_inside:
            self._num_seen += len(token_ids)
            return
        if self._end_id in token_ids:
            self._is_behind = True
            token_ids = token_ids[: token_ids.index(self._end_id) + 1]
        self.num_tokens += self._num_seen + len(token_ids)
        self._num_seen = 0


class HarmonyCounter:
    """Counts the messages of the channel `analysis`, with their markers."""

    def __init__(self, channel_id: int, analysis_id: int, start_id: int, *, begins_inside: bool) -> None:
        self.num_tokens = 0
        self._channel_id, self._analysis_id, self._start_id = channel_id, analysis_id, start_id
        self._is_inside = begins_inside
        self._num_held = 0  # tokens of a header whose channel is not known yet
        self._names_channel = False

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._names_channel:
                self._names_channel = False
                self._is_inside = token_id == self._analysis_id
                if self._is_inside:
                    self.num_tokens += self._num_held + 1
                self._num_held = 0
            elif token_id in (self._start_id, self._channel_id):
                self._num_held = self._num_held + 1 if token_id == self._channel_id else 1
                self._names_channel = token_id == self._channel_id
                self._is_inside = False
            elif self._is_inside:
                self.num_tokens += 1
            elif self._num_held:
                self._num_held += 1


TokenCounter = ReasoningCounter | HarmonyCounter
