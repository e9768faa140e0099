"""The numbers of tokens for which a decoding step is captured in a CUDA graph. Plain numbers, without torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE_SIZES = (1, 2, 4)
_SIZES_A_DOUBLING = 8

MULTI_TOKEN_STEP = 256
"""A row has several tokens if drafts or forced tokens are checked with it. A graph is captured for steps of more tokens
than rows up to this size: larger steps keep a GPU busy for longer than a host takes to launch them."""


def largest_size(max_running: int, row_tokens: int, token_budget: int) -> int:
    """The largest number of tokens to capture, if rows hold up to `row_tokens`."""
    return max(max_running, min(max_running * row_tokens, MULTI_TOKEN_STEP, token_budget))


def default_sizes(largest: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, then multiples of 8, above 128 multiples of 16, above 256 of 32, and so on, eight sizes for each
    doubling, and `largest` at the end. Beyond 64, padding adds at most an eighth."""
    sizes = [size for size in _FINE_SIZES if size < largest]
    size = step = _SIZES_A_DOUBLING
    while size < largest:
        sizes.append(size)
        if size >= 2 * _SIZES_A_DOUBLING * step:
            step *= 2
        size += step
    return (*sizes, largest)


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_tokens`, or None."""
    at = bisect_left(sizes, num_tokens)
    return sizes[at] if at < len(sizes) else None
