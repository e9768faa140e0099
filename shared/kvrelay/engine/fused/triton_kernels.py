"""Triton kernels: what lies between the matrix products of a decoder layer on a GPU, batch-invariant products, and
token masks.

Import this module lazily: Triton comes with CUDA builds of torch only. Sums and angles are float32; each kernel reads
and writes each number once.
"""
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.engine.fused.gpu_forward import MergedLinear, TorchPieces

_HEADS_A_PROGRAM = 8
_WIDTH_A_PROGRAM = 1024
_MOST_ELEMENTS = 1 << 15  # the longest row that one program holds in registers


@triton.jit
def _add_and_norm(
    hidden, delta, norm, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):  # one program a token
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(hidden + row * width + columns, inside, 0.0)
    if HAS_DELTA:
        x += tl.load(delta + row * width + columns, inside, 0.0).to(tl.float32)
        tl.store(hidden + row * width + columns, x, inside)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(norm + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + columns, (x * scale * weight).to(out.dtype.element_ty), inside)


@triton.jit
def _norm_and_rotate(
    qkv,
    query_norm,
    key_norm,
    cos,
    sin,
    positions,
    token_stride,
    num_query_heads,
    num_heads,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # one program for some heads of a token
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    in_half = columns < HALF
    inside = (heads < num_heads)[:, None] & in_half[None]
    first_at = qkv + token * token_stride + heads[:, None] * (2 * HALF) + columns[None]
    first = tl.load(first_at, inside, 0.0).to(tl.float32)
    second = tl.load(first_at + HALF, inside, 0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (heads < num_query_heads)[:, None]
        first_weight = tl.where(
            is_query,
            tl.load(query_norm + columns, in_half, 0.0)[None].to(tl.float32),
            tl.load(key_norm + columns, in_half, 0.0)[None].to(tl.float32),
        )
        second_weight = tl.where(
            is_query,
            tl.load(query_norm + HALF + columns, in_half, 0.0)[None].to(tl.float32),
            tl.load(key_norm + HALF + columns, in_half, 0.0)[None].to(tl.float32),
        )
        first *= scale * first_weight
        second *= scale * second_weight
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + columns, in_half, 0.0)[None]
    s = tl.load(sin + position * HALF + columns, in_half, 0.0)[None]
    tl.store(first_at, (first * c - second * s).to(qkv.dtype.element_ty), inside)
    tl.store(first_at + HALF, (second * c + first * s).to(qkv.dtype.element_ty), inside)


@triton.jit
def _silu_and_multiply(gate_up, out, width, BLOCK: tl.constexpr):  # one program for a part of a token
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + columns, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


# One shape for any number of rows: another would multiply in other instructions, which add up in another order. The
# sums of an output are in one program, in the order of its inputs.
_TILE = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
_TILES_A_GROUP = 16  # tiles of rows beside each other in the order of programs, whose inputs the L2 cache holds


# By default Triton compiles a kernel again for numbers that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # one program a tile of the output
    num_in_group = GROUP * tl.cdiv(num_out, COLUMNS)
    first = tl.program_id(0) // num_in_group * GROUP
    number, height = tl.program_id(0) % num_in_group, tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    rows = ((first + number % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (number // height * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inputs = tl.arange(0, DEPTH)
    has_row, has_column = rows < num_rows, columns < num_out
    x_at = x + rows[:, None] * num_in + inputs[None]
    weight_at = weight + columns[None] * num_in + inputs[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_in, DEPTH):
        inside = inputs < num_in - start
        left = tl.load(x_at + start, has_row[:, None] & inside[None], 0.0)
        right = tl.load(weight_at + start, has_column[None] & inside[:, None], 0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, has_column, 0.0).to(tl.float32)[None]
    out_at = out + rows[:, None] * num_out + columns[None]
    tl.store(out_at, sums.to(out.dtype.element_ty), has_row[:, None] & has_column[None])


class TritonPieces(TorchPieces):
    """The same as Triton kernels. Triton compiles each at its first use, and keeps it in `~/.triton`."""

    name = "triton"

    def _invariant_linear(self, x: torch.Tensor, merged: MergedLinear) -> torch.Tensor:
        weight, bias, num_rows = merged.weight, merged.bias, len(x)
        num_out, num_in = weight.shape
        out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(num_rows, _TILE["ROWS"]) * triton.cdiv(num_out, _TILE["COLUMNS"]),)
        _linear[grid](
            x.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias,
            out,
            num_rows,
            num_out,
            num_in,
            HAS_BIAS=bias is not None,
            GROUP=_TILES_A_GROUP,
            **_TILE,
        )
        return out

    def add_and_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        width = hidden.shape[1]
        assert width <= _MOST_ELEMENTS, f"{width} elements of a token do not fit one program"
        block = triton.next_power_of_2(width)
        out = torch.empty(hidden.shape, dtype=norm.dtype, device=hidden.device)
        _add_and_norm[(len(hidden),)](
            hidden,
            hidden if delta is None else delta,
            norm,
            out,
            width,
            eps,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )
        return out

    def norm_and_rotate(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        num_heads: tuple[int, int],
        eps: float,
    ) -> None:
        half, (cos, sin) = qkv.shape[-1] // 2, angles
        query_norm, key_norm = norms or (cos, cos)
        _norm_and_rotate[(len(qkv), triton.cdiv(sum(num_heads), _HEADS_A_PROGRAM))](
            qkv,
            query_norm,
            key_norm,
            cos,
            sin,
            positions,
            qkv.stride(0),
            num_heads[0],
            sum(num_heads),
            eps,
            HAS_NORM=norms is not None,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            HEADS=_HEADS_A_PROGRAM,
            num_warps=4,
        )

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        grid = (len(gate_up), triton.cdiv(width, _WIDTH_A_PROGRAM))
        _silu_and_multiply[grid](gate_up, out, width, BLOCK=_WIDTH_A_PROGRAM, num_warps=4)
        return out


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
