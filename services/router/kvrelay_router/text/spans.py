"""Caches the token ids of spans of about 256 characters, so that a known beginning of a text takes few lookups.

Instructions, tools and the turns of a conversation recur unchanged. A text is cut into spans from its beginning, so
texts with a common beginning have the same spans up to the one in which they differ. A cut is before a space that an
ASCII letter follows, which is cut (b) of `pieces.py`. So the pieces of the spans are the pieces of the text, and their
ids are the ids of the text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice

SPAN_CHARS = 256
LONGEST_SPANS = 2
"""Maximum length of a cached span, in multiples of `SPAN_CHARS`: a text without a space before a letter has no cut."""
WINDOW_CHARS = 1 << 16
"""Maximum characters per regex call. `re` holds the GIL for the whole call, about 4 ms if a window has no cut."""
MAX_SPANS, MAX_IDS = 1 << 13, 1 << 20
"""Maximum cached spans and ids: about 10 MB, because most ids are objects that the piece cache also holds; 60 MB for
texts made to fill the cache."""
MAX_SEEN = 1 << 15
MAX_LEARNED = 32
"""Maximum spans to learn from one text: a span costs more by itself than within its text."""


class SpanCache:
    """The ids of spans that occurred at least twice. `encode` returns the ids of any text. Thread-safe."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        *,
        capacity: int = MAX_SPANS,
        max_ids: int = MAX_IDS,
        span_chars: int = SPAN_CHARS,
        window_chars: int = WINDOW_CHARS,
    ) -> None:
        self._encode = encode
        self._capacity, self._max_ids = capacity, max_ids
        self._window_chars = window_chars
        self._cut = re.compile(rf".{{{span_chars},}}?(?= [A-Za-z]|\Z)|.+", re.DOTALL).findall
        self._longest = LONGEST_SPANS * span_chars
        self._ids: dict[str, list[int]] = {}
        self._num_ids = 0
        self._seen: set[int] = set()  # hashes of spans that occurred once; a collision only learns a span too early
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_ids(self) -> int:
        """The number of cached ids; an upper bound if several threads learned the same span."""
        return self._num_ids

    def encode(self, text: str) -> list[int]:
        return self._encode_spans(list(chain.from_iterable(self._windows_of(text))))

    def encode_windows(self, text: str) -> Iterator[list[int]]:
        """The ids of a text, window by window. A caller that needs no more of them may stop."""
        return map(self._encode_spans, self._windows_of(text))

    def _encode_spans(self, spans: list[str]) -> list[int]:
        found = list(map(self._ids.get, spans))
        if None in found:
            found = self._complete(spans, found)
        return list(chain.from_iterable(found))  # type: ignore[arg-type]

    def _windows_of(self, text: str) -> Iterator[list[str]]:
        """The spans of a text, window by window. The last span of a window is cut again in the next. If a window has no
        cut, the rest of the text is one span."""
        start = 0
        while len(text) - start > self._window_chars:
            *whole, _ = self._cut(text, start, start + self._window_chars)
            if not whole:
                yield [text[start:]]
                return
            yield whole
            start += sum(map(len, whole))
        yield self._cut(text, start)

    def _complete(self, spans: list[str], found: list[list[int] | None]) -> list[list[int] | None]:
        """Encodes and caches each span that occurs for the second time. Adjacent new spans are encoded together."""
        if self._seen.isdisjoint(map(hash, spans)) and not any(found):
            self._saw(spans)
            return [self._encode("".join(spans))]
        complete: list[list[int] | None] = []
        row: list[str] = []
        learned: dict[str, list[int]] = {}
        for span, ids in zip(spans, found, strict=True):
            if ids is None:
                if hash(span) not in self._seen or len(span) > self._longest or len(learned) >= MAX_LEARNED:
                    row.append(span)
                    continue
                ids = learned[span] = learned.get(span) or self._encode(span)
            if row:
                complete.append(self._encode("".join(row)))
                self._saw(row)
                row = []
            complete.append(ids)
        if row:
            complete.append(self._encode("".join(row)))
            self._saw(row)
        if learned:
            self._remember(learned)
        return complete

    def _saw(self, spans: list[str]) -> None:
        with self._changing:
            self._seen.update(map(hash, spans))
            if len(self._seen) > MAX_SEEN:
                self._seen.clear()

    def _remember(self, learned: dict[str, list[int]]) -> None:
        with self._changing:
            self._ids.update(learned)
            self._num_ids += sum(map(len, learned.values()))
            while len(self._ids) > self._capacity or self._num_ids > self._max_ids:
                for span in list(islice(self._ids, (len(self._ids) + 1) // 2)):  # drop the older half
                    del self._ids[span]
                self._num_ids = sum(map(len, self._ids.values()))
