"""Truncates distributions (min_p, top_k, top_p) and samples from the rest.

Distributions are weights relative to the most likely token's 1 and do not sum to 1. All limits are lower bounds on the
weight, so tokens with equal weights are kept or cut together. Sampling walks the kept tokens by id. Rounding noise in
the logits then shifts the result only by its own size, whatever order a sort gives to near ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# Numbers of best tokens to try before the whole vocabulary is sorted, which costs far more. Larger on a GPU: top-k
# costs about the same there for any k, and one row that is sampled again discards the step that was launched behind it.
_BEST = (256, 4096)
_BEST_ON_GPU = (1024, 4096)
_SEGMENT = 128  # tokens summed at once before sampling looks closer


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each row: tensors `[rows]` on the weights' device."""

    min_p: torch.Tensor  # float32; 0: off
    top_k: torch.Tensor  # int64; 0: off
    top_p: torch.Tensor  # float64; 1: off

    def of(self, rows: torch.Tensor) -> Limits:
        return Limits(self.min_p[rows], self.top_k[rows], self.top_p[rows])


def sample_from_all(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over all tokens. Takes `[rows, vocab]` float32 and `[rows]` float64 in [0, 1); returns
    ids `[rows]`."""
    rows = weights.shape[0]
    segments, ends = _segments(weights)
    target = uniforms * ends[:, -1]
    segment = _first_above(ends, target)
    before = torch.where(segment > 0, ends.gather(1, (segment - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = segments[torch.arange(rows, device=weights.device), segment].to(torch.float64).cumsum(dim=-1)
    return segment * _SEGMENT + _first_above(inside, target - before)


def _segments(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in segments, and the running sums at their ends.

    torch divides the sum of a single long row among its threads, so that its bits would depend on the number of rows.
    """
    if padding := -weights.shape[1] % _SEGMENT:
        weights = torch.nn.functional.pad(weights, (0, padding))
    segments = weights.view(weights.shape[0], weights.shape[1] // _SEGMENT, _SEGMENT)
    return segments, segments.sum(dim=-1).to(torch.float64).cumsum(dim=-1)


def sample_from_few(weights: torch.Tensor, limits: Limits, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples from the tokens within the limits: min_p and top_k first, then top_p of the rest.

    Looks at few tokens only, and does not wait. Returns ids `[rows]`, and whether these tokens were enough for each
    row.
    """
    return _sample_from_best(weights, min(_sizes(weights.device)[0], weights.shape[1]), limits, uniforms)


def sample_from_more(weights: torch.Tensor, limits: Limits, uniforms: torch.Tensor) -> torch.Tensor:
    """Samples for rows for which few tokens were not enough. Looks at more tokens, in the end at all. Waits for the
    device."""
    vocab_size = weights.shape[1]
    token_ids = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    left = torch.arange(len(weights), device=weights.device)
    for num_best in (*(size for size in _sizes(weights.device)[1:] if size < vocab_size), vocab_size):
        part = weights if len(left) == len(weights) else weights[left]
        sampled, settled = _sample_from_best(part, num_best, limits.of(left), uniforms[left])
        token_ids[left[settled]] = sampled[settled]
        left = left[~settled]
        if not len(left):
            break
    return token_ids


def _sizes(device: torch.device) -> tuple[int, ...]:
    return _BEST_ON_GPU if device.type == "cuda" else _BEST


def _sample_from_best(
    weights: torch.Tensor, num_best: int, limits: Limits, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as if only the `num_best` most likely tokens were kept. Returns ids, and for each row whether that was
    enough."""
    vocab_size = weights.shape[1]
    best, ids = torch.topk(weights, num_best, dim=-1)
    counts = torch.where(limits.top_k == 0, vocab_size, limits.top_k).clamp(max=vocab_size)
    kth = best.gather(1, counts.clamp(max=num_best)[:, None] - 1)[:, 0]
    floor = torch.maximum(limits.min_p, torch.where(counts < vocab_size, kth, 0.0))
    mass = (best * (best >= floor[:, None])).to(torch.float64).cumsum(dim=-1)
    whole = torch.where(floor > 0, mass[:, -1], _segments(weights)[1][:, -1])
    settled = (counts <= num_best) | (counts == vocab_size)
    settled &= (floor == 0) | (best[:, -1] < floor)
    # top_p keeps the fewest tokens that reach it; without top_p, all that the other limits left are kept.
    kept = ((mass < (whole * limits.top_p)[:, None]).sum(dim=-1) + 1).clamp(max=num_best)
    by_mass = torch.where(limits.top_p < 1, best.gather(1, kept[:, None] - 1)[:, 0], 0.0)
    floor = torch.maximum(floor, by_mass)
    settled &= best[:, -1] < floor
    in_id_order, order = ids.sort(dim=-1)
    ends = (best * (best >= floor[:, None])).gather(1, order).to(torch.float64).cumsum(dim=-1)
    at = _first_above(ends, uniforms * ends[:, -1])
    return in_id_order.gather(1, at[:, None])[:, 0], settled | (num_best == vocab_size)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index whose running sum is above the target. If rounding leaves none, the last one that adds weight."""
    above = (ends <= target[:, None]).sum(dim=-1)
    last = (ends < ends[:, -1:]).sum(dim=-1)
    return torch.minimum(above, last)


_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

UInt64Array = NDArray[np.uint64]


def uniforms(seeds: UInt64Array, sequence_indices: UInt64Array, positions: UInt64Array) -> NDArray[np.float64]:
    """Returns a number in [0, 1) with 53 random bits for each (seed, sequence index, position). All arrays are
    `[rows]`."""
    counter = (positions & _LOW, positions >> _SHIFT, sequence_indices & _LOW, np.zeros_like(positions))
    first, second, _, _ = philox(counter, (seeds & _LOW, seeds >> _SHIFT))
    bits = ((first << _SHIFT) | second) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[UInt64Array, UInt64Array]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Runs ten rounds over 32-bit words that are stored in 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = (product_1 >> _SHIFT) ^ c1 ^ k0, product_1 & _LOW
        c2, c3 = (product_0 >> _SHIFT) ^ c3 ^ k1, product_0 & _LOW
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
    return c0, c1, c2, c3
