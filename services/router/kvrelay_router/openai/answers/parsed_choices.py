"""What the texts of an answer's choices say: reasoning, content and tool calls."""

from __future__ import annotations

from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.output_parsing.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallBegun,
)

TOOL_CALLS = "tool_calls"


class ParsedChoices:
    """Selects the events that the answer shows, and remembers which choices have calls.

    `parallel_calls`: an output may have several calls; otherwise those behind the first are dropped. `is_plain`: all
    text is content. `only_calls`: the output has calls and no content, so what looks like content is a call that was
    cut before its name. It is dropped.
    """

    def __init__(
        self,
        *,
        is_plain: bool = False,
        parallel_calls: bool = True,
        include_reasoning: bool = True,
        only_calls: bool = False,
    ) -> None:
        self.is_plain = is_plain
        self.include_reasoning = include_reasoning
        self._parallel_calls = parallel_calls
        self._only_calls = only_calls
        self._have_calls: set[int] = set()

    def events(self, choice: Choice, text: str) -> list[Event]:
        """The events of a choice's new text, and those of its end if it has finished."""
        events = choice.take_events(text)
        if not self.include_reasoning:
            events = [each for each in events if not isinstance(each, ReasoningText)]
        if self._only_calls:
            events = [each for each in events if not isinstance(each, ContentText)]
        if not self._parallel_calls:
            events = [each for each in events if isinstance(each, ContentText | ReasoningText) or each.index == 0]
        if any(isinstance(each, ToolCallBegun) for each in events):
            self._have_calls.add(choice.index)
        return events

    def finish_reason(self, choice: Choice) -> str | None:
        """The reason for clients: `tool_calls` for a choice with calls that was not cut."""
        if choice.finish_reason == "stop" and choice.index in self._have_calls:
            return TOOL_CALLS
        return choice.finish_reason
