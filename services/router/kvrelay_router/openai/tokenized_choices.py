"""The choices of a selection as tokens: what all begin with, and what follows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvrelay_router.http.api_error import wrong
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.shared_scores import num_common, num_equal


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
    common = await num_common(rows)
    return TokenizedChoices(rows[0][:common], [row[common:] for row in rows], first)
