"""Cuts a distribution down (min_p, top_k, top_p) and draws from what is left.

All cuts are thresholds on the logit, so tokens that tie at the edge stay together and the result does not depend on the
order of a sort. The draw walks the tokens by id: rounding noise of logits then moves a draw by as little as itself.
"""

from __future__ import annotations

import torch

_FEW = 1024  # top_p is usually reached within so many tokens; a full sort of the vocabulary costs far more
_SEGMENT = 256  # tokens summed at once before the draw looks closer


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drops tokens less likely than `min_p` times the most likely one; `[rows, vocab]`, `[rows]`, float32."""
    floor = logits.amax(dim=-1) + torch.log(min_p)
    return _drop_below(logits, floor)


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps the `top_k` most likely tokens, and those that tie with the last; `top_k` is `[rows]`, at least 1."""
    counts = top_k.clamp(max=logits.shape[-1])
    best = torch.topk(logits, int(counts.max()), dim=-1).values
    return _drop_below(logits, best.gather(1, counts[:, None] - 1)[:, 0])


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest most likely tokens whose probabilities, of what is left, reach `top_p` (`[rows]`, float64)."""
    peak = logits.amax(dim=-1, keepdim=True)
    wanted = torch.exp(logits - peak).sum(dim=-1, dtype=torch.float64) * top_p
    few = min(_FEW, logits.shape[-1])
    floor, reached = _top_p_floor(torch.topk(logits, few, dim=-1).values, peak, wanted)
    if few < logits.shape[-1] and not reached.all():
        rows = (~reached).nonzero()[:, 0]
        in_order = torch.sort(logits[rows], dim=-1, descending=True).values
        floor[rows], _ = _top_p_floor(in_order, peak[rows], wanted[rows])
    return _drop_below(logits, floor)


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in float64, tokens by id: `[rows, vocab]` logits and `[rows]` float64 in [0, 1) give `[rows]` ids."""
    rows, vocab_size = logits.shape
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    weights = torch.nn.functional.pad(weights, (0, -vocab_size % _SEGMENT)).view(rows, -1, _SEGMENT)
    ends = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniforms * ends[:, -1]
    segment = _first_above(ends, target)
    before = torch.where(segment > 0, ends.gather(1, (segment - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = weights[torch.arange(rows, device=logits.device), segment].to(torch.float64).cumsum(dim=-1)
    return segment * _SEGMENT + _first_above(inside, target - before)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index whose running sum is above the target; where rounding leaves none, the last that adds weight."""
    above = (ends <= target[:, None]).sum(dim=-1)
    last = (ends < ends[:, -1:]).sum(dim=-1)
    return torch.minimum(above, last)


def _top_p_floor(in_order: torch.Tensor, peak: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit kept of `in_order` (falling), and whether its tokens suffice for the wanted mass."""
    mass = torch.exp(in_order - peak).to(torch.float64).cumsum(dim=-1)
    kept = ((mass < wanted[:, None]).sum(dim=-1) + 1).clamp(max=in_order.shape[-1])
    return in_order.gather(1, kept[:, None] - 1)[:, 0], mass[:, -1] >= wanted


def _drop_below(logits: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < floor[:, None], float("-inf"))
