"""The most likely continuations of sequences: one log-softmax and one top-k over all such rows of a step.

Penalties, biases and minimum lengths change the log-probabilities and not the logits, as in
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.run.device import to_host
from kvrelay.engine.sample.logprobs import best_tokens, check_finite
from kvrelay.engine.sample.sampler import Sampler, Seen
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import Candidates, CandidatesWanted


def best_candidates(
    sampler: Sampler,
    keys: Sequence[SequenceKey],
    wanted: Sequence[CandidatesWanted],
    positions: NDArray[np.int64],
    logits: torch.Tensor,
) -> list[Candidates]:
    """By row the `num_candidates` best continuations, best first; fewer where the vocabulary has fewer.

    Of equal ones the lower id is better, on a CPU. What min_tokens forbids has -inf, and is left out unless there is
    nothing else.

    `logits` is `[rows, vocab]` of any float type; `positions` are those of the tokens to come. Keys may repeat. Raises
    BadLogits for rows whose logits are not finite, KeyError for an unknown key.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    sampler.adjust(keys, positions, scores, _seen(wanted, sampler.penalises(keys)))
    num_wanted = np.minimum([each.num_candidates for each in wanted], scores.shape[-1])
    best_ids, best_scores = best_tokens(scores, num_wanted)
    peaks_there = logits.amax(dim=-1)
    with sampler.waiting():
        peaks, token_ids, values = to_host(peaks_there, best_ids, best_scores)
    check_finite(keys, peaks)
    return [
        _candidates(ids[:count], row[:count])
        for ids, row, count in zip(token_ids.astype(np.int32), values.astype(np.float32), num_wanted, strict=True)
    ]


def _candidates(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Candidates:
    possible = np.isfinite(logprobs)
    return Candidates(token_ids[possible], logprobs[possible]) if possible.any() else Candidates(token_ids, logprobs)


def _seen(wanted: Sequence[CandidatesWanted], penalised: NDArray[np.bool_]) -> Seen:
    """The earlier tokens of the rows that have a penalty."""
    rows, token_ids, in_output = [], [], []
    for row in np.flatnonzero(penalised).tolist():
        each = wanted[row]
        distinct, places = np.unique(each.history.astype(np.int64), return_inverse=True)
        rows.append(np.full(len(distinct), row, np.int64))
        token_ids.append(distinct)
        in_output.append(np.bincount(places[each.num_prompt :], minlength=len(distinct)).astype(np.int32))
    if not rows:
        empty = np.zeros(0, np.int64)
        return empty, empty, np.zeros(0, np.int32)
    return np.concatenate(rows), np.concatenate(token_ids), np.concatenate(in_output)
