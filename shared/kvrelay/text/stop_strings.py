"""Finds stop strings in a text that arrives in parts, and withholds text that may be the start of one.

Each stop string has a Knuth-Morris-Pratt automaton, whose state is the number of its characters that the end of the
text matches. So the time is linear in the text for any strings, and the largest state is the number of characters to
withhold. The string that ends first wins; if two end at the same character, the longer one wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


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
