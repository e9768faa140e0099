"""The interface to a library of grammars. Library: `llguidance_compiler.py`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.sampling import Grammar

TokenMask = NDArray[np.int32]
"""One bit per token of the vocabulary, the lowest bit first: 1 if the token may be the next one."""


def allow_only(mask: TokenMask, *token_ids: int) -> None:
    """Writes the mask that allows these tokens."""
    mask[:] = 0
    allow(mask, *token_ids)


def allow(mask: TokenMask, *token_ids: int) -> None:
    """Allows these tokens as well."""
    allowed = mask.view(np.uint8)
    for token_id in token_ids:
        allowed[token_id >> 3] |= 1 << (token_id & 7)


def remove(mask: TokenMask, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
    """Clears the bits of tokens, in place."""
    in_bytes = mask.view(np.uint8)
    for token_id in token_ids:
        in_bytes[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


def allow_all(mask: TokenMask, all_tokens: TokenMask) -> None:
    """Writes the mask of the vocabulary. `mask` may be longer."""
    mask[: len(all_tokens)] = all_tokens
    mask[len(all_tokens) :] = 0


def address_of(mask: TokenMask) -> int:
    """Returns the mask's address in memory. Takes 40% of the time of `mask.ctypes.data`; called for every mask."""
    return addressof(c_char.from_buffer(mask.data)) if mask.flags.writeable else int(mask.ctypes.data)


class GrammarError(ValueError):
    """The grammar is malformed, not supported or too complex. The message is for the client."""


class GrammarMatcher(Protocol):
    """What one sequence's output may go on with, by a grammar or by other rules. Not thread-safe."""

    @property
    def allows_all(self) -> bool:
        """Whether every token is allowed from here to the end of the output."""

    def copy(self) -> GrammarMatcher:
        """A matcher at the same place that goes on by itself."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends output tokens. Raises GrammarError for a token that the grammar does not allow there."""

    def forced(self) -> Sequence[int]:
        """The tokens that have to come next: those that the tokenizer makes of the bytes that every output goes on
        with, and the end-of-sequence token after a complete output if there is only one such token. A mask at the place
        of such a token allows it alone.

        Bytes at the end of which a token could also go on into bytes that are not forced are left out. Empty after an
        end-of-sequence token. Raises GrammarError.
        """

    def fill(self, mask: TokenMask) -> None:
        """Writes which tokens may come next; after a complete output, only end-of-sequence tokens.

        Raises:
            GrammarError: the state became too complex, or no token may follow.
        """


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    @property
    def mask_words(self) -> int:
        """Length of a `TokenMask`."""

    def knows(self, grammar: Grammar) -> bool:
        """Returns whether the grammar is compiled already."""

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the output. May take milliseconds the first time; releases the GIL meanwhile.

        Raises GrammarError.
        """
