"""For which numbers of sequences a decoding step is captured in a CUDA graph. Plain numbers, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE_SIZES = (1, 2, 4)
_SIZES_A_DOUBLING = 8


def default_sizes(max_running: int) -> tuple[int, ...]:
    """1, 2 and 4; from 8 on multiples of 8, of 16 above 128, of 32 above 256, and so on, eight sizes each time that
    they double; and `max_running` itself, at the end. Beyond 64 padding adds an eighth at most.
    """
    sizes = [size for size in _FINE_SIZES if size < max_running]
    size = step = _SIZES_A_DOUBLING
    while size < max_running:
        sizes.append(size)
        if size >= 2 * _SIZES_A_DOUBLING * step:
            step *= 2
        size += step
    return (*sizes, max_running)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of `sizes`, which rise, that holds `num_rows`; None: none does."""
    at = bisect_left(sizes, num_rows)
    return sizes[at] if at < len(sizes) else None
