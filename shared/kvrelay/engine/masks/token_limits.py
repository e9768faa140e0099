"""The tokens that `allowed_token_ids` and `bad_words` leave.

The order of a bad word's tokens matters: its last token is forbidden where the output ends with the others. So only
words of several tokens depend on the output, and of these only the ones whose last token but one is the newest are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher, TokenMask, allow_all, remove
from kvrelay.protocol.sampling import Sampling


class NoTokenLeft(GrammarError):
    """No token can continue the output."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The limits of one sequence."""

    mask: TokenMask  # without the bad words of several tokens
    words: dict[int, list[tuple[list[int], int]]]  # key: the last token but one; the tokens before the last, the last
    most: int  # tokens before the last of the longest word

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> TokenLimits:
        allowed = np.full(vocab_size, not sampling.allowed_token_ids)
        allowed[list(sampling.allowed_token_ids)] = True
        words: dict[int, list[tuple[list[int], int]]] = {}
        for word in sampling.bad_words:
            *before, last = word
            if before:
                words.setdefault(before[-1], []).append((before, last))
            else:
                allowed[last] = False
        return cls(packed(allowed), words, max((len(word) - 1 for word in sampling.bad_words), default=0))


class LimitedMatcher:
    """A `GrammarMatcher`: what limits leave of what a grammar or a budget for reasoning allows."""

    allows_all = False

    def __init__(self, limits: TokenLimits, matcher: GrammarMatcher | None, all_tokens: TokenMask) -> None:
        """`matcher`: what else decides. `all_tokens`: the mask of the vocabulary."""
        self._limits, self._matcher, self._all_tokens = limits, matcher, all_tokens
        self._tail: list[int] = []  # the newest output tokens, as many as words need

    def copy(self) -> LimitedMatcher:
        matcher = None if self._matcher is None else self._matcher.copy()
        copied = LimitedMatcher(self._limits, matcher, self._all_tokens)
        copied._tail = self._tail
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        if self._matcher is not None:
            self._matcher.accept(token_ids)
        if self._limits.most:
            self._tail = [*self._tail, *token_ids][-self._limits.most :]

    def forced(self) -> Sequence[int]:
        return ()  # the limits may forbid what the others force

    def fill(self, mask: TokenMask) -> None:
        if self._matcher is None:
            allow_all(mask, self._all_tokens)
        else:
            self._matcher.fill(mask)
        mask[: len(self._limits.mask)] &= self._limits.mask
        mask[len(self._limits.mask) :] = 0  # a tokenizer may have more tokens than the model
        tail = self._tail
        for before, last in self._limits.words.get(tail[-1], ()) if tail else ():
            if tail[-len(before) :] == before:
                remove(mask, [last])
        if not mask.any():
            raise NoTokenLeft(
                "no token can continue the output: its grammar, allowed_token_ids and bad_words contradict each other"
            )


def packed(allowed: NDArray[np.bool_]) -> TokenMask:
    """The mask of a flag for each token."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)
