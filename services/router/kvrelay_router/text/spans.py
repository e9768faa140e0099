"""Token ids of texts by their spans of some 256 characters: what begins alike is looked up in a few steps.

Instructions, tools and the turns of a conversation come again and again as they are. A text is cut into spans from its
beginning on, so texts that begin alike have the same ones, up to that in which they part. Cuts are where those of
pieces are that need nothing but the two characters behind them (`pieces.py`, (b)): a space and a letter of ASCII. So
the spans' pieces are the text's, and so are their ids.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import chain, islice

SPAN_CHARS = 256
LONGEST_SPANS = 2
"""Times as long are those that are remembered: a text without a space before a letter has no cut."""
WINDOW_CHARS = 1 << 16
"""Are cut at a time: an expression keeps the GIL to its end, for some 4 ms where so long a text has no cut."""
MAX_SPANS, MAX_IDS = 1 << 13, 1 << 20
"""That are remembered: about 10 MB, as ids are mostly the numbers that the memory of pieces has; 60 MB of what is
chosen to fill them."""
MAX_SEEN = 1 << 15
MAX_LEARNED = 32
"""Of one text: a span that is encoded by itself costs more than within its text."""


class SpanMemory:
    """Ids of the spans that came at least twice. `encode`: of any text, by pieces. Safe in threads."""

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
        self._seen: set[int] = set()  # hashes of spans that came once; of two with the same one is learned early
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_ids(self) -> int:
        """Of all spans that are remembered; more where threads learned the same at once."""
        return self._num_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        spans = self._spans_of(text)
        found = list(map(self._ids.get, spans))
        if None in found:
            found = self._complete(spans, found)
        return list(chain.from_iterable(found))  # type: ignore[arg-type]

    def _spans_of(self, text: str) -> list[str]:
        """Of a long text window by window, whose last span ends with the window, and is cut again in the next. What
        follows a window without a cut is one span."""
        spans: list[str] = []
        start = 0
        while len(text) - start > self._window_chars:
            *whole, _ = self._cut(text, start, start + self._window_chars)
            if not whole:
                return [*spans, text[start:]]
            spans += whole
            start += sum(map(len, whole))
        return spans + self._cut(text, start)

    def _complete(self, spans: list[str], found: list[list[int] | None]) -> list[list[int] | None]:
        """Spans that come for the second time are encoded by themselves, and remembered; those in a row that are new,
        together."""
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
                for span in list(islice(self._ids, (len(self._ids) + 1) // 2)):  # the older: what recurs is soon back
                    del self._ids[span]
                self._num_ids = sum(map(len, self._ids.values()))
