"""What the text of one output says: its events, up to a stop string in its content, and the kinds of its tokens.

Text that may be the start of a stop string is withheld. Each stop string has a Knuth-Morris-Pratt automaton, whose
state is the number of its characters that the end of the text matches. So the time is linear in the text for any
strings, and the largest state is the number of characters to withhold. The string that ends first wins; if two end at
the same character, the longer one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import compress

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.output_parsing.events import ContentText, Event, OutputParser, ReasoningText, ToolCallBegun


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The text to release, and the stop string that ended it, if any."""

    text: str
    matched: str | None = None


class _Automaton:
    __slots__ = ("failure", "matched_chars", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_chars = 0
        self.failure = _failure_table(pattern)

    def advance(self, text: str, end: int) -> int | None:
        """Reads text[:end]. Returns the index after the first full match, or None."""
        pattern, failure, state = self.pattern, self.failure, self.matched_chars
        position = 0
        while position < end:
            if state == 0:
                position = text.find(pattern[0], position, end)
                if position < 0:
                    break
            char = text[position]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
            position += 1
            if state == len(pattern):
                self.matched_chars = state
                return position
        self.matched_chars = state
        return None


@lru_cache(maxsize=1024)
def _failure_table(pattern: str) -> tuple[int, ...]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    state = 0
    for index in range(1, len(pattern)):
        while state and pattern[index] != pattern[state]:
            state = table[state - 1]
        if pattern[index] == pattern[state]:
            state += 1
        table[index] = state
    return tuple(table)


class StopMatcher:
    """Matches the stop strings of one sequence. Feed no text after a match."""

    def __init__(self, stop: list[str], *, include_in_output: bool) -> None:
        self._automata = [_Automaton(pattern) for pattern in sorted(set(stop), key=len, reverse=True)]
        self._include_in_output = include_in_output
        self._withheld = ""

    def feed(self, text: str) -> StopMatch:
        """Returns the text that cannot be the start of a stop string, and the match if there is one."""
        if not text:
            return StopMatch("")
        first_end = len(text)
        winner: str | None = None
        for automaton in self._automata:
            # Longer strings come first, so a shorter one wins only by ending strictly earlier.
            limit = first_end if winner is None else first_end - 1
            end = automaton.advance(text, limit)
            if end is not None:
                first_end, winner = end, automaton.pattern
        seen = self._withheld + text[:first_end]
        if winner is None:
            cut = len(seen) - max((automaton.matched_chars for automaton in self._automata), default=0)
            self._withheld = seen[cut:]
            return StopMatch(seen[:cut])
        self._withheld = ""
        return StopMatch(seen if self._include_in_output else seen[: len(seen) - len(winner)], winner)

    def flush(self) -> str:
        """Returns the withheld text, for a text that ends without a match. The next `feed` begins another text."""
        withheld, self._withheld = self._withheld, ""
        for automaton in self._automata:
            automaton.matched_chars = 0
        return withheld


class TokenKind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


Group = tuple[list[TokenLogprobs], int]
"""Tokens that end together, with the position of their end: a character may consist of several tokens."""


class TokenKinds:
    """Parsers withhold text, so the kind of a token is known only once an event has its text, or a later one.

    A marker has the kind of the reasoning or call that it delimits.
    """

    def __init__(self) -> None:
        self.entries: list[TokenLogprobs] = []
        self.kinds: list[TokenKind] = []
        self._last: TokenKind | None = None
        self._text: list[str] = []
        self._num_chars = 0
        self._groups: list[Group] = []
        self._open: list[TokenLogprobs] = []

    def add(self, entry: TokenLogprobs | None, text: str) -> None:
        """Takes the next token and the text that it brings; None for text that completes the last token."""
        if entry is not None:
            self._open.append(entry)
        if text:
            self._text.append(text)
            self._num_chars += len(text)
            self._groups.append((self._open, self._num_chars))
            self._open = []

    def decide(self, events: Sequence[Event]) -> None:
        """Takes the events of the text that was added last."""
        if not events or not self._groups:
            return
        kinds, num_chars = self._kinds_of_chars(events)
        num_groups, start = 0, 0
        for group, end in self._groups:
            if start >= num_chars:
                break
            found = set(kinds[start:end])
            for each in (TokenKind.CONTENT, TokenKind.REASONING, TokenKind.CALL):
                if each in found:
                    self._note(group, each)
                    break
            num_groups, start = num_groups + 1, end
        self._drop(num_groups, start)

    def end(self) -> None:
        """The tokens that are left have no event: the marker of the end, and whitespace behind the last text."""
        last = self._last or TokenKind.CONTENT
        for group, _ in self._groups:
            self._note(group, last)
        self._note(self._open, last)
        self._groups, self._open, self._text, self._num_chars = [], [], [], 0

    def take(self) -> tuple[list[TokenLogprobs], list[TokenKind]]:
        """Returns the tokens that were decided since the last call."""
        taken = self.entries, self.kinds
        self.entries, self.kinds = [], []
        return taken

    def _kinds_of_chars(self, events: Sequence[Event]) -> tuple[list[TokenKind], int]:
        """The kind of each character, and how many of them are decided: all up to the end of the last event."""
        text = "".join(self._text)
        kinds: list[TokenKind | None] = [None] * len(text)
        before = num_decided = len(text)
        for number, event in enumerate(reversed(events)):
            if not isinstance(event, ContentText | ReasoningText):
                continue  # arguments may be written in another way
            start = text.rfind(event.text, 0, before)
            if start < 0:
                continue
            kind = TokenKind.CONTENT if isinstance(event, ContentText) else TokenKind.REASONING
            end = start + len(event.text)
            kinds[start:end] = [kind] * len(event.text)
            before = start
            if number == 0:
                num_decided = end
        is_call = not isinstance(events[-1], ContentText | ReasoningText)
        return self._filled(kinds[:num_decided], TokenKind.CALL if is_call else None), num_decided

    def _filled(self, kinds: list[TokenKind | None], last: TokenKind | None) -> list[TokenKind]:
        """Gives the characters between two texts a kind. `last`: of what follows the last text."""
        filled: list[TokenKind] = []
        following: list[TokenKind | None] = []
        for kind in reversed(kinds):
            last = kind or last
            following.append(last)
        previous = self._last
        for kind, after in zip(kinds, reversed(following), strict=True):
            filled.append(kind or _between(previous, after))
            previous = kind or previous
        return filled

    def _note(self, group: list[TokenLogprobs], kind: TokenKind) -> None:
        self.entries += group
        self.kinds += [kind] * len(group)
        self._last = kind

    def _drop(self, num_groups: int, num_chars: int) -> None:
        self._text = ["".join(self._text)[num_chars:]]
        self._groups = [(group, end - num_chars) for group, end in self._groups[num_groups:]]
        self._num_chars -= num_chars


def _between(before: TokenKind | None, after: TokenKind | None) -> TokenKind:
    if after is TokenKind.CALL:
        return TokenKind.CALL
    if TokenKind.REASONING in (before, after):
        return TokenKind.REASONING
    return TokenKind.CONTENT if before is TokenKind.CONTENT else TokenKind.CALL


class ParsedText:
    """The events that the answer shows of a text.

    `hides_reasoning`: it shows no reasoning, nor its log-probabilities. `parallel_calls`: an output may have several
    calls; otherwise those behind the first are dropped. `only_calls`: the output has calls and no content, so what
    looks like content is a call that was cut before its name. It is dropped.
    """

    def __init__(
        self, parser: OutputParser, *, hides_reasoning: bool, parallel_calls: bool = True, only_calls: bool = False
    ) -> None:
        self.hides_reasoning = hides_reasoning
        self.has_calls = False
        self.kinds = TokenKinds()
        self._parser = parser
        self._parallel_calls, self._only_calls = parallel_calls, only_calls
        self._events: list[Event] = []
        self._content: list[str] = []  # joined to one event

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
        """Returns the events since the last call. No two adjacent ones are content."""
        self._end_content()
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
                self._append(event)
            elif matcher is None:
                self._append_content(event.text)
            else:
                match = matcher.feed(event.text)
                self._append_content(match.text)
                if match.matched is not None:
                    return match.matched
        return None

    def _append(self, event: Event) -> None:
        if isinstance(event, ReasoningText):
            if self.hides_reasoning:
                return
        elif not isinstance(event, ContentText) and event.index and not self._parallel_calls:
            return
        self._end_content()
        self.has_calls |= isinstance(event, ToolCallBegun)
        self._events.append(event)

    def _append_content(self, text: str) -> None:
        if text and not self._only_calls:
            self._content.append(text)

    def _end_content(self) -> None:
        if self._content:
            self._events.append(ContentText("".join(self._content)))
            self._content = []
