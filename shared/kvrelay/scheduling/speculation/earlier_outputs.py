"""The texts in which guesses are found: an index of a text, and the outputs of ended sequences.

Each owner has texts and an index of its own, so no lookup meets the text of another owner. Memory is bounded: an owner
has two parts, of which the older one is dropped when the newer one is full, and of all owners the one whose texts were
not used for longest is dropped first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable

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


OWNER_TOKENS = 64
"""An owner counts as so many tokens beside its own: many owners of short texts take memory too."""
_PARTS = 8  # one part of an owner has an eighth of all tokens, so an owner has at most a quarter
_SEPARATOR = np.array([-1], np.int32)  # ends each text. It equals no token, so no match spans two texts


class OutputsPart:
    """Texts one behind the other, and their index."""

    __slots__ = ("index", "tokens")

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens = TokenBuffer(np.zeros(0, np.int32))
        self.index = NgramIndex(self.tokens, shortest, longest)

    def following(self, place: int, count: int) -> list[int]:
        """The tokens from `place` on, up to the end of their text."""
        found: list[int] = self.tokens.view(place, place + count).tolist()
        return found[: found.index(-1)] if -1 in found else found


class EarlierOutputs:
    """At most `max_tokens` tokens of ended sequences, 0 for none, by owner."""

    def __init__(self, max_tokens: int, shortest: int, longest: int) -> None:
        self.num_tokens = 0  # includes separators, and `OWNER_TOKENS` per owner
        self._max_tokens = max_tokens
        self._shortest = shortest
        self._longest = longest
        self._owners: OrderedDict[Hashable, list[OutputsPart]] = OrderedDict()  # newest part first; used last: last
        self._not_indexed: dict[OutputsPart, None] = {}

    def of(self, owner: Hashable) -> list[OutputsPart]:
        """The owner's texts, the newer part first."""
        parts = self._owners.get(owner)
        if parts is None:
            return []
        self._owners.move_to_end(owner)
        return parts

    def add(self, owner: Hashable, token_ids: NDArray[np.int32]) -> None:
        """Adds a text, or its end if it is longer than a part. It is found once it is indexed."""
        room = self._max_tokens // _PARTS
        text = token_ids[-(room - 1) :] if len(token_ids) >= room else token_ids
        if room <= OWNER_TOKENS or len(text) <= self._shortest:
            return
        parts = self._owners.get(owner)
        if parts is None:
            parts = self._owners[owner] = []
            self.num_tokens += OWNER_TOKENS
        self._owners.move_to_end(owner)
        if not parts or len(parts[0].tokens) + len(text) >= room:
            parts.insert(0, OutputsPart(self._shortest, self._longest))
            for part in parts[2:]:
                self._drop(part)
            del parts[2:]
        parts[0].tokens.extend(text)
        parts[0].tokens.extend(_SEPARATOR)
        self.num_tokens += len(text) + 1
        self._not_indexed[parts[0]] = None
        while self.num_tokens > self._max_tokens:
            _, oldest = self._owners.popitem(last=False)
            self.num_tokens -= OWNER_TOKENS
            for part in oldest:
                self._drop(part)

    def index(self, most: int) -> int:
        """Indexes new tokens, at most so many. Returns how many."""
        num_left = most
        while self._not_indexed and num_left:
            part = next(iter(self._not_indexed))
            num_left -= part.index.extend(num_left)
            if part.index.is_current:
                del self._not_indexed[part]
        return most - num_left

    def _drop(self, part: OutputsPart) -> None:
        self.num_tokens -= len(part.tokens)
        self._not_indexed.pop(part, None)
