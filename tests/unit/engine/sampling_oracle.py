"""One row's draw, written out in float64 without thought for speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.sampling import Sampling


def adjusted_logits(
    sampling: Sampling, prompt: Sequence[int], output: Sequence[int], logits: NDArray[np.float32], eos: Sequence[int]
) -> NDArray[np.float64]:
    """Logits after penalties, bias, min_tokens and limits of tokens."""
    x = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    if sampling.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in sampling.allowed_token_ids]] = -np.inf
    for *before, last in sampling.bad_words:
        if list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if len(output) < sampling.min_tokens:
        without = x.copy()
        without[list(sampling.stop_token_ids)] = -np.inf
        if not sampling.ignore_eos:
            without[list(eos)] = -np.inf
        if not sampling.limits_tokens or np.isfinite(without).any():
            return without
    return x


def kept_probabilities(sampling: Sampling, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distribution that is drawn from."""
    x = x / sampling.temperature
    weights = np.exp(x - x.max())
    weights[weights < sampling.min_p] = 0
    if sampling.top_k:
        weights[weights < np.sort(weights)[-min(sampling.top_k, len(weights))]] = 0
    in_order = np.sort(weights)[::-1] / weights.sum()
    before = np.cumsum(in_order) - in_order
    weights[weights / weights.sum() < in_order[before < sampling.top_p].min()] = 0
    kept: NDArray[np.float64] = weights / weights.sum()
    return kept


def draw(probabilities: NDArray[np.float64], uniform: float) -> tuple[int, float]:
    """Inverse CDF over ids, and how far the number was from picking a neighbour."""
    ends = np.cumsum(probabilities)
    return int((ends <= uniform).sum()), float(np.abs(ends - uniform).min())
