"""The batch sizes for which a decoding step is captured in a CUDA graph. Plain numbers, without torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE_SIZES = (1, 2, 4)
_SIZES_A_DOUBLING = 8


def default_sizes(max_running: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, then multiples of 8, above 128 multiples of 16, above 256 of 32, and so on, eight sizes for each
    doubling, and `max_running` at the end. Beyond 64, padding adds at most an eighth."""
    sizes = [size for size in _FINE_SIZES if size < max_running]
    size = step = _SIZES_A_DOUBLING
    while size < max_running:
        sizes.append(size)
        if size >= 2 * _SIZES_A_DOUBLING * step:
            step *= 2
        size += step
    return (*sizes, max_running)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_rows`, or None."""
    at = bisect_left(sizes, num_rows)
    return sizes[at] if at < len(sizes) else None
