"""Finds earlier places of a text that its end repeats (prompt lookup: Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from kvrelay.scheduling.sequence import TokenBuffer

_ID_BYTES = 4
_MOST_CANDIDATES = 8  # places that are compared for one match


class NgramIndex:
    """The places of each n-gram of `shortest` tokens in a text that only grows. Each token is indexed once, so a
    lookup that finds nothing costs one dictionary access."""

    def __init__(self, tokens: TokenBuffer, shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._last: dict[bytes, int] = {}  # n-gram -> the position behind its latest place
        self._before = array("i", bytes(_ID_BYTES * shortest))  # position behind a place -> that of the place before
        self._newest = b""  # the n-gram that ends the text, which is not indexed before it is followed by a token

    def extend(self, most: int) -> int:
        """Indexes new tokens of the text, at most so many. Returns how many."""
        size, start = self._shortest, len(self._before)  # n-grams that end before `start` are indexed
        stop = min(self._tokens.num_tokens, start + most)
        if stop <= start:
            return 0
        data = self._tokens.view(start - size, stop).tobytes()
        last, before, num_bytes = self._last, self._before, size * _ID_BYTES
        at = 0
        for position in range(start, stop):
            ngram = data[at : at + num_bytes]
            before.append(last.get(ngram, 0))
            last[ngram] = position
            at += _ID_BYTES
        self._newest = data[at : at + num_bytes]
        return stop - start

    @property
    def is_current(self) -> bool:
        """Returns whether all tokens are indexed."""
        return len(self._before) == self._tokens.num_tokens

    def find(self) -> tuple[int, int]:
        """The length of the longest earlier match of the end of the text, up to `longest`, and the position behind the
        latest place of it. (0, 0): none. The index must be current."""
        place = self._last.get(self._newest, 0)
        if not place:
            return 0, 0
        best, found, num_left = 0, 0, _MOST_CANDIDATES
        while place and num_left:
            length = self._length_of_match(place, self._tokens)
            if length > best:
                best, found = length, place
                if length == self._longest:
                    break
            place, num_left = self._before[place], num_left - 1
        return best, found

    def find_all(self, text: TokenBuffer) -> tuple[int, list[int]]:
        """As `find`, for the end of this or another text, with the positions behind all places of that length, latest
        first, of the latest places of its n-gram."""
        size = self._shortest
        newest = self._newest if text is self._tokens else text.view(text.num_tokens - size, text.num_tokens).tobytes()
        place = self._last.get(newest, 0)
        best, num_left = 0, _MOST_CANDIDATES
        found: list[int] = []
        while place and num_left:
            length = self._length_of_match(place, text)
            if length > best:
                best, found = length, [place]
            elif length == best:
                found.append(place)
            place, num_left = self._before[place], num_left - 1
        return best, found

    def following(self, place: int, count: int) -> NDArray[np.int32]:
        """The tokens from `place` on; past the end of the text, those that a repetition from `place` on would have."""
        tokens = self._tokens
        found = tokens.view(place, min(place + count, tokens.num_tokens))
        return found if len(found) == count else np.resize(found, count)

    def _length_of_match(self, place: int, text: TokenBuffer) -> int:
        end = text.num_tokens
        most = min(self._longest, place, end)
        differs = self._tokens.view(place - most, place) != text.view(end - most, end)
        return most - 1 - int(differs.nonzero()[0][-1]) if differs.any() else most
