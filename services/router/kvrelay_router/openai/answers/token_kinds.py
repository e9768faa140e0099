"""Finds which tokens of a parsed output became content, and which reasoning or calls."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.output_parsing.events import ContentText, Event, ReasoningText


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
