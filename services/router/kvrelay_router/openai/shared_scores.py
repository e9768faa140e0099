"""Prompts of one request that are only scored: what all begin with is scored once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.protocol.sampling import Sampling
from kvrelay_router.loop_share import LoopShare


async def share_scores(prompts: Sequence[list[int]], samplings: list[Sampling]) -> list[Sampling]:
    """Returns sampling parameters by which the first prompt scores all its tokens, and the others only those behind
    what all prompts have in common. Workers are told how much of that they need not compute again.

    `samplings` score the prompts from the same token on, and generate nothing.
    """
    if len(prompts) == 1:
        return samplings
    num_common = min(await _num_common(prompts), min(map(len, prompts)) - 1)
    start = samplings[0].logprob_start_len
    first = max(start, num_common)
    # The logits of the token before the first scored one are needed.
    num_shared = min(num_common, first - 1)
    replace = msgspec.structs.replace
    others = [replace(each, logprob_start_len=first, num_shared=num_shared) for each in samplings[1:]]
    return [replace(samplings[0], num_shared=num_shared), *others]


async def _num_common(prompts: Sequence[list[int]]) -> int:
    """The number of tokens that all prompts begin with. O(prompts * length), by comparisons of slices."""
    first, share = prompts[0], LoopShare()
    common = len(first)
    for prompt in prompts[1:]:
        common = num_equal(first, prompt, common)
        await share.pause()
    return common


def num_equal(one: list[int], other: list[int], most: int) -> int:
    """The number of tokens with which both begin, at most `most`. Compares slices: a loop over tokens is slower."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
