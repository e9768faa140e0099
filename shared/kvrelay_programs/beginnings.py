"""What texts, or lists of tokens, have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence


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
