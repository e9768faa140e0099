"""Drafts for the hash model: right ones, up to a place where a wrong one may be."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from kvrelay.scheduling.scheduler_settings import SpeculationSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.speculator import Speculator
from tests.fakes.hash_runner import VOCAB_SIZE, next_token


class GuessingSpeculator(Speculator):
    """Drafts up to `most_drafts` tokens. It knows what the model samples; a hash of the sequence and its length says
    how many drafts it makes and which of them is wrong."""

    def __init__(self, most_drafts: int) -> None:
        super().__init__(SpeculationSettings("ngram" if most_drafts else "off"))
        self._most_drafts = most_drafts

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        number = zlib.crc32(f"{sequence.key} {sequence.num_tokens}".encode())
        count = min(most, number % (self._most_drafts + 1))
        if count < 1:
            return None
        tokens, wrong = sequence.tokens.view(0, sequence.num_tokens).tolist(), number // 64 % (2 * count)
        for at in range(count):
            token = next_token(np.array(tokens, np.int32), sequence.sampling, sequence.key[2])
            tokens.append(token if at != wrong else (token + 1) % VOCAB_SIZE)
        return np.array(tokens[sequence.num_tokens :], np.int32)

    def expects(self, sequence: Sequence) -> bool:
        """Whether steps are planned ahead changes with the length too."""
        return zlib.crc32(f"{sequence.key} {sequence.num_tokens} ahead".encode()) % 3 > 0
