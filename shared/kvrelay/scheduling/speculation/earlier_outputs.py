"""Outputs of ended sequences, for drafts of later ones of the same owner.

Each owner has texts and an index of its own, so no lookup meets the text of another owner. Memory is bounded: an owner
has two parts, of which the older one is dropped when the newer one is full, and of all owners the one whose texts were
not used for longest is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from kvrelay.scheduling.sequence import TokenBuffer
from kvrelay.scheduling.speculation.ngram_index import NgramIndex

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
