"""A lower bound of the number of tokens of a text, from its length alone.

A text that certainly exceeds the model's context is refused before it is tokenized. The bound weighs the bytes of each
class (letters, other ASCII, the rest) so that no token of the vocabulary weighs more than 1: then the weight of a text
is at most the number of its tokens.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable
from unicodedata import is_normalized

LETTERS = string.ascii_letters.encode()
BEYOND_ASCII = bytes(range(128, 256))
NFC_SHRINKS = 3
"""Canonical composition (NFC) leaves at least a third of the bytes beyond ASCII: three Hangul letters of 3 bytes
make one syllable of 3 bytes."""


def _counts(data: bytes) -> tuple[int, int, int]:
    """The number of letters, of other ASCII characters, and of bytes beyond ASCII."""
    num_letters = len(data) - len(data.translate(None, LETTERS))
    num_beyond = len(data) - len(data.translate(None, BEYOND_ASCII))
    return num_letters, len(data) - num_letters - num_beyond, num_beyond


class TokenBound:
    """A bound for tokenizers whose tokens spell all bytes of the text, as it is or in NFC."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """`tokens`: the bytes of all tokens that a text can become."""
        counts = {_counts(token) for token in tokens}
        most = [max((each[index] for each in counts), default=0) for index in range(3)]
        heaviest = max(
            (sum(count / limit for count, limit in zip(each, most, strict=True) if count) for each in counts),
            default=0.0,
        )
        self._weights = [1 / (limit * heaviest) if limit else 0.0 for limit in most]

    def least_tokens(self, text: str) -> int:
        """Takes about 1 ms for each MiB."""
        letters, others, beyond = _counts(text.encode(errors="replace"))
        if not text.isascii() and not is_normalized("NFC", text):
            # A letter or sign may become a part of a character beyond ASCII.
            letters, others, beyond = 0, 0, beyond // NFC_SHRINKS
        weight = sum(num * each for num, each in zip((letters, others, beyond), self._weights, strict=True))
        return math.floor(weight * (1 - 1e-9))  # rounding must not add a token
