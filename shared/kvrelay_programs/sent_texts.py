"""Texts that an endpoint has got lately, so that it has probably computed their beginnings."""

from __future__ import annotations

from collections import deque

from kvrelay_programs.beginnings import num_common

MOST_KEPT = 16


class SentTexts:
    """The last few texts. Used on one event loop."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=MOST_KEPT)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def num_known(self, text: str) -> int:
        """Number of characters at the beginning of `text` with which one of the kept texts begins, too."""
        longest = 0
        for known in self._texts:
            # Most texts of a batch differ in what is behind the longest beginning found so far, or before.
            if known[: longest + 1] == text[: longest + 1]:
                longest = num_common(known, text, longest)
        return longest
