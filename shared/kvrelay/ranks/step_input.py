"""What rank 0 publishes for a step: only what the other ranks do not have yet."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

SAMPLES, IS_PREFILL, IS_BEAM = 1, 2, 4
"""Bits of the column `flags`."""
NUM_COLUMNS = 10


class StepInput(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """A step, relative to what the ranks have.

    `dropped` are the numbers of sequences that ended, and `admitted` has number and length of new ones, which may take
    those numbers. `data` is int32 in the machine's byte order: the columns of all rows (see `Columns`), tokens of
    admissions, new tokens of rows, new blocks of rows, copies (sources, then targets), then blocks and slots of
    `num_out` and of `num_back` swaps.
    """

    step: int
    num_rows: int
    data: bytes
    dropped: list[int] = []
    admitted: list[tuple[int, int]] = []
    num_copies: int = 0
    num_out: int = 0
    num_back: int = 0


class Columns(NamedTuple):
    """The rows of a step, one entry each.

    A row computes `num_tokens` tokens at `position`. The last `num_new` of them are sent; the ranks have the others.
    Its block table is the first `num_kept` blocks of the table that the ranks have, and `num_blocks` new ones.
    """

    number: list[int]
    position: list[int]
    num_tokens: list[int]
    num_new: list[int]
    num_kept: list[int]
    num_blocks: list[int]
    num_drafts: list[int]
    first_scored: list[int]
    num_scored: list[int]
    flags: list[int]


class OutOfStep(Exception):
    """A step does not continue what this rank has, so an earlier one was lost. The rank cannot go on."""


class MirroredSequence:
    """A sequence as all ranks have it: tokens by position, and the block table of its newest row.

    Tokens that were never sent are 0 on all ranks. Tokens behind the newest row may be rejected drafts.
    """

    __slots__ = ("num_tokens", "number", "table", "tokens")

    def __init__(self, number: int, tokens: Int32Array) -> None:
        self.number = number
        self.tokens = tokens  # its length is the capacity
        self.num_tokens = len(tokens)
        self.table: Int32Array = np.empty(0, np.int32)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for so many tokens."""
        if num_tokens > len(self.tokens):
            grown = np.zeros(max(num_tokens, 2 * len(self.tokens), 64), np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown
        if num_tokens > self.num_tokens:
            self.num_tokens = num_tokens
