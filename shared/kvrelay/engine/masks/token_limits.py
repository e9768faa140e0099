"""The tokens that `allowed_token_ids` and `bad_words` leave to sequences, as masks.

The order of a bad word's tokens matters: its last token is forbidden where the output ends with the others. So only
words of several tokens depend on the output, and of these only the ones whose last token but one is the newest are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.grammar.grammar_compiler import TokenMask
from kvrelay.protocol.sampling import Sampling


@dataclass(slots=True)
class _Limit:
    mask: TokenMask  # without the bad words of several tokens
    words: dict[int, list[tuple[list[int], int]]]  # key: the last token but one; the tokens before the last, the last
    most: int  # tokens before the last of the longest word
    tail: list[int]  # the newest output tokens, at least `most` if there are as many


class TokenLimits:
    """The limits of the sampler's slots. Not thread-safe; the owner locks."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._limits: dict[int, _Limit] = {}  # key: slot
        self.all_tokens = self._packed(np.ones(vocab_size, np.bool_))
        """The mask of the whole vocabulary."""

    def add(self, slot: int, sampling: Sampling, output_ids: Sequence[int]) -> None:
        """Starts a sequence, if it has limits, with the output that it has already. Raises ValueError if the bad words
        of one token leave none."""
        if not sampling.limits_tokens:
            return
        allowed = np.full(self._vocab_size, not sampling.allowed_token_ids)
        allowed[list(sampling.allowed_token_ids)] = True
        words: dict[int, list[tuple[list[int], int]]] = {}
        for word in sampling.bad_words:
            *before, last = word
            if before:
                words.setdefault(before[-1], []).append((before, last))
            else:
                allowed[last] = False
        if not allowed.any():
            raise ValueError("bad words forbid all allowed tokens")
        most = max((len(word) - 1 for word in sampling.bad_words), default=0)
        self._limits[slot] = _Limit(self._packed(allowed), words, most, list(output_ids[-most:]) if most else [])

    def drop(self, slot: int) -> None:
        self._limits.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._limits

    def __bool__(self) -> bool:
        return bool(self._limits)

    def accept(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Appends landed tokens `[rows]`. A slot may repeat, for tokens in their order."""
        if not self._limits:
            return
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            limit = self._limits.get(slot)
            if limit is not None and limit.most:
                limit.tail.append(token_id)
                if len(limit.tail) > 2 * limit.most + 64:
                    del limit.tail[: -limit.most]

    def restrict(self, slot: int, mask: TokenMask, drafts: Sequence[int] = ()) -> None:
        """Removes from a mask what the slot may not sample next, or behind drafts, in place. Slots without limits stay
        as they are."""
        limit = self._limits.get(slot)
        if limit is None:
            return
        mask &= limit.mask
        tail = [*limit.tail[-limit.most :], *drafts] if drafts and limit.most else limit.tail
        for before, last in limit.words.get(tail[-1], ()) if tail else ():
            if tail[-len(before) :] == before:
                remove(mask, [last])

    def _packed(self, allowed: NDArray[np.bool_]) -> TokenMask:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        bits[: self._vocab_size] = allowed
        return np.packbits(bits, bitorder="little").view(np.int32)


def remove(mask: TokenMask, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
    """Clears the bits of tokens, in place."""
    in_bytes = mask.view(np.uint8)
    for token_id in token_ids:
        in_bytes[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
