"""Finds stop strings in a text that arrives in pieces, and withholds what could still become one.

Each stop string has its Knuth-Morris-Pratt automaton; its state is how many of its characters the text's end matches.
So the cost is linear in the text whatever the strings are, and the longest state is exactly what must be withheld.
The string that is complete first wins; of two that are complete at once, the longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class _Automaton:
    """One stop string's progress through the text."""

    __slots__ = ("failure", "matched_chars", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_chars = 0
        self.failure = _failure_table(pattern)

    def advance(self, text: str, end: int) -> int | None:
        """Reads text[:end]; the index after the last character of the first full match, or None."""
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
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
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
    """The stop strings of one sequence. After a match it takes no more text."""

    def __init__(self, stop: list[str], *, include_in_output: bool) -> None:
        self._automata = [_Automaton(pattern) for pattern in sorted(set(stop), key=len, reverse=True)]
        self._include_in_output = include_in_output
        self._withheld = ""

    def feed(self, text: str) -> StopMatch:
        """Text that cannot be the start of a stop string any more, and the match if there is one."""
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
        """What was withheld; at the end of a sequence that no stop string ended."""
        withheld, self._withheld = self._withheld, ""
        return withheld
