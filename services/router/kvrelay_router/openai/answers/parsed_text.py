"""What the text of one output says: its events, up to a stop string in its content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.openai.answers.token_kinds import TokenKind, TokenKinds
from kvrelay_router.output_parsing.events import ContentText, Event, OutputParser
from kvrelay_router.text.stop_strings import StopMatcher


class ParsedText:
    """`hides_reasoning`: the answer is to have no reasoning, nor its log-probabilities."""

    def __init__(self, parser: OutputParser, *, hides_reasoning: bool) -> None:
        self.hides_reasoning = hides_reasoning
        self.kinds = TokenKinds()
        self._parser = parser
        self._events: list[Event] = []

    def feed(self, text: str, matcher: StopMatcher | None) -> str | None:
        """Parses new text. Returns the stop string that ends the output, if `matcher` finds one in its content."""
        return self._add(self._parser.feed(text), matcher)

    def finish(self, matcher: StopMatcher | None) -> str | None:
        """Parses the end of the text, as `feed` does."""
        matched = self._add(self._parser.finish(), matcher)
        if matched is None and matcher is not None:
            self._append_content(matcher.flush())
        return matched

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def take_scores(self) -> tuple[list[TokenLogprobs], list[TokenKind]]:
        """Returns the log-probabilities to show of the tokens whose kinds were decided since the last call."""
        entries, kinds = self.kinds.take()
        if self.hides_reasoning and TokenKind.REASONING in kinds:
            shown = [kind is not TokenKind.REASONING for kind in kinds]
            return list(compress(entries, shown)), list(compress(kinds, shown))
        return entries, kinds

    def _add(self, events: Sequence[Event], matcher: StopMatcher | None) -> str | None:
        self.kinds.decide(events)
        for event in events:
            if not isinstance(event, ContentText):
                if matcher is not None:  # a stop string may not span a call
                    self._append_content(matcher.flush())
                self._events.append(event)
            elif matcher is None:
                self._append_content(event.text)
            else:
                match = matcher.feed(event.text)
                self._append_content(match.text)
                if match.matched is not None:
                    return match.matched
        return None

    def _append_content(self, text: str) -> None:
        """Joins texts: consumers count on no two adjacent events with content."""
        if not text:
            return
        if self._events and isinstance(last := self._events[-1], ContentText):
            text, _ = last.text + text, self._events.pop()
        self._events.append(ContentText(text))
