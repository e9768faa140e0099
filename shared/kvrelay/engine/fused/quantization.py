"""Weights in 8 or 4 bits, rounded at load. Activations and sums keep their types."""

from __future__ import annotations

from typing import Literal

import torch

Quantization = Literal["none", "int8", "int4"]
"""int8: a scale for each output. int4: a scale for each output and 64 inputs, of some the best in squared error."""

INT4_GROUP = 64
_INT4_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # tried factors of the scale that keeps the largest weight
_ROWS_AT_ONCE = 1024  # bounds the memory of the search


def quantize(rows: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rounds rows `[rows, num_in]`. Returns int8 codes of the same shape, bfloat16 scales `[groups, rows]`, and the
    number of inputs that share a scale. A weight is about its code times its scale."""
    group = rows.shape[1] if quantization == "int8" else INT4_GROUP
    parts = [_quantize_part(part, quantization, group) for part in rows.split(_ROWS_AT_ONCE)]
    codes, scales = torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])
    return codes[:, : rows.shape[1]], scales.t().contiguous(), group


def _quantize_part(rows: torch.Tensor, quantization: Quantization, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % group))
    groups = padded.view(len(rows), -1, group)
    most = 127 if quantization == "int8" else 7
    largest = groups.abs().amax(dim=2, keepdim=True) / most
    codes, scales, error = _round(groups, largest, most)
    for shrink in _INT4_SHRINK[1:] if quantization == "int4" else ():
        tried, tried_scales, tried_error = _round(groups, largest * shrink, most)
        better = tried_error < error
        codes, scales = torch.where(better, tried, codes), torch.where(better, tried_scales, scales)
        error = torch.where(better, tried_error, error)
    return codes.view(len(rows), -1), scales[:, :, 0]


def _round(groups: torch.Tensor, scales: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, the scales as stored, and the squared error of each group."""
    stored = scales.bfloat16()
    divisor = torch.where(stored == 0, torch.ones_like(stored), stored).float()
    codes = (groups / divisor).round_().clamp_(-most - 1, most)
    error = (codes * stored.float() - groups).square_().sum(dim=2, keepdim=True)
    return codes.to(torch.int8), stored, error
