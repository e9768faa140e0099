"""Prompts and choices of one request that are only scored: what all begin with is scored once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvrelay.protocol.sampling import Sampling
from kvrelay.text.request.api_error import wrong
from kvrelay_router.loop_share import LoopShare


def share_scores(prompts: Sequence[list[int]], samplings: list[Sampling]) -> list[Sampling]:
    """Returns sampling parameters by which the first prompt scores all its tokens, and the others only those behind
    what all prompts have in common. Workers are told how much of that they need not compute again.

    `samplings` score the prompts from the same token on, and generate nothing.
    """
    return samplings if len(prompts) == 1 else scored_once(samplings, num_common(prompts))


def scored_once(samplings: Sequence[Sampling], num_common: int) -> list[Sampling]:
    """As `share_scores`, for prompts of which all begin with the same `num_common` tokens, and none is shorter."""
    start = samplings[0].logprob_start_len
    first = max(start, num_common)
    # The logits of the token before the first scored one are needed.
    num_shared = min(num_common, first - 1)
    replace = msgspec.structs.replace
    others = [replace(each, logprob_start_len=first, num_shared=num_shared) for each in samplings[1:]]
    return [replace(samplings[0], num_shared=num_shared), *others]


def num_common(prompts: Sequence[list[int]]) -> int:
    """The number of tokens that all prompts begin with, without the last one of the shortest prompt: each keeps a token
    of its own. O(prompts * length), by comparisons of slices."""
    first = prompts[0]
    common = len(first) - 1
    for prompt in prompts[1:]:
        common = num_equal(first, prompt, min(common, len(prompt) - 1))
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


class TokenizedChoices(msgspec.Struct, frozen=True):
    """`common` are the tokens with which a text begins behind which any of the choices stands, and `endings` what
    follows them, at least one token each. The score of every choice begins at position `first`, which is 1 or more."""

    common: list[int]
    endings: list[list[int]]
    first: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the common part, and of all endings."""
        return len(self.common) + sum(map(len, self.endings))

    @property
    def longest(self) -> int:
        """Tokens of the text with the longest choice."""
        return len(self.common) + max(map(len, self.endings))


async def tokenize_choices(
    encode: Callable[[str], Awaitable[list[int]]], choices: Sequence[str], param: str
) -> TokenizedChoices:
    """`encode` returns the tokens of the text with a choice, or with none.

    A text may have other tokens at its end once a choice follows. The scores of all choices therefore begin at the
    first token by which the text alone differs from that with any of them. Raises ApiError for a text without tokens,
    which is of the field `param`, and for a choice that adds none.
    """
    share = LoopShare()
    alone = await encode("")
    if not alone:
        raise wrong(param, "it has no tokens")
    rows: list[list[int]] = []
    num_alone = len(alone)
    for choice in choices:
        row = await encode(choice)
        num_alone = num_equal(alone, row, num_alone)
        rows.append(row)
        await share.pause()
    first = max(1, num_alone)
    for index, row in enumerate(rows):
        if len(row) <= first:
            raise wrong(f"choices[{index}]", "it adds no token to the text that can be scored")
    common = num_common(rows)
    return TokenizedChoices(rows[0][:common], [row[common:] for row in rows], first)
