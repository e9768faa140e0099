"""Token masks on a GPU as a Triton kernel: the bits are read where they lie, and only forbidden logits are written.

Import this module lazily: Triton comes with CUDA builds of torch only.
"""
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS_A_PROGRAM = 2048


@triton.jit
def _apply(
    logits, rows, masks, row_stride, num_words, vocab_size, COLUMNS: tl.constexpr
):  # a program for a part of a row
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < vocab_size
    words = tl.load(masks + place * num_words + (columns >> 5), inside, 0)
    is_allowed = (words >> (columns & 31)) & 1
    row = tl.load(rows + place)
    tl.store(logits + row * row_stride + columns, float("-inf"), inside & (is_allowed == 0))


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets logits, `[rows, vocab]` float32 on a GPU, to minus infinity in place, in the rows `rows`, `[masks]` int64,
    where the bits of `masks`, `[masks, words]` int32, are 0."""
    vocab_size = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab_size, _COLUMNS_A_PROGRAM))
    _apply[grid](
        logits, rows, masks, logits.stride(0), masks.shape[1], vocab_size, COLUMNS=_COLUMNS_A_PROGRAM, num_warps=4
    )
