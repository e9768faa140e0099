"""Encodes the candidates of a beam search for the wire."""

from __future__ import annotations

import numpy as np

from kvrelay.protocol.messages import PackedCandidates
from kvrelay.step.batch import BeamCandidates


def pack_candidates(candidates: BeamCandidates) -> PackedCandidates:
    """Returns little-endian int32 token ids and float32 log-probabilities."""
    return PackedCandidates(
        candidates.token_ids.astype("<i4").tobytes(),
        candidates.logprobs.astype("<f4").tobytes(),
    )


def are_in_vocabulary(packed: PackedCandidates, vocab_size: int) -> bool:
    """Returns whether all candidates are tokens of a model with so many."""
    token_ids = np.frombuffer(packed.token_ids, "<i4")
    return int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size


def unpack_candidates(packed: PackedCandidates) -> BeamCandidates:
    """Inverts `pack_candidates`. Raises ValueError if the bytes are not such arrays."""
    token_ids = np.frombuffer(packed.token_ids, "<i4").astype(np.int32)
    logprobs = np.frombuffer(packed.logprobs, "<f4").astype(np.float32)
    if len(token_ids) != len(logprobs) or not len(token_ids):
        raise ValueError(f"{len(token_ids)} candidates with {len(logprobs)} log-probabilities")
    return BeamCandidates(token_ids, logprobs)
