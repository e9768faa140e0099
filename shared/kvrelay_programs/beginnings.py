"""What texts, or lists of tokens, have in common at their beginning, and the texts that an endpoint has got lately.

It has probably computed the beginnings of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MOST_KEPT = 16


def num_common(one: Sequence[object], other: Sequence[object], least: int = 0) -> int:
    """Number of items at the beginning that are the same, of which `least` are known to be.

    Bisects, as comparing slices is much faster than comparing items.
    """
    most = min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


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
