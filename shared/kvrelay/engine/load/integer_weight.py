"""A linear layer's weight as integers with scales: unpacked from GPTQ, AWQ and compressed-tensors checkpoints, or
rounded at load to 8 or 4 bits. Activations and sums keep their types.

All three formats pack codes of 4 or 8 bits into 32-bit words, the first code in the lowest bits. They differ in the
axis along which they pack, and AWQ in the order of the codes of a word. Codes and zero points are signed numbers here:
half of the codes' range is subtracted from both where a format has unsigned ones.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch

from kvrelay.backends.cpu_build import load_kernel

_WORD_BITS = 32
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has the columns 0 to 7 of a word."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """The weight of output n and input k is `(codes[n, k] - zeros[g, n]) * scales[g, n]` for the group g of input k."""

    codes: torch.Tensor  # int8 [num_out, num_in]
    scales: torch.Tensor  # float16, bfloat16 or float32 [groups, num_out]
    zeros: torch.Tensor | None  # int8 [groups, num_out]; None: all are 0
    bits: int  # width of a code, 4 or 8
    group: int  # inputs of a group, of which the last may have fewer
    group_of_input: torch.Tensor | None = None  # int64 [num_in]; None: groups are runs of `group` inputs

    @property
    def num_in(self) -> int:
        return self.codes.shape[1]

    @property
    def zero_points(self) -> torch.Tensor:
        """`zeros`, or a tensor of them."""
        return torch.zeros(self.scales.shape, dtype=torch.int8) if self.zeros is None else self.zeros

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight `[num_out, num_in]`, computed in float32."""
        groups = self.group_of_input
        if groups is None:
            groups = torch.arange(self.num_in) // self.group
        scales = self.scales.float()[groups].t()
        if self.zeros is None:
            return (self.codes * scales).to(dtype)
        return ((self.codes - self.zeros.short()[groups].t()) * scales).to(dtype)


def unpack_gptq(
    weights: torch.Tensor, zeros: torch.Tensor, bits: int, *, zeros_less_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes `[num_out, num_in]` and zero points `[groups, num_out]` of `qweight`, which packs inputs, and
    `qzeros`, which packs outputs.

    `zeros_less_one`: the format's first version stores each zero point less one, and 0 as the largest code.
    """
    codes = _unpack_last(weights.t().contiguous(), bits)
    points = _unpack_last(zeros, bits) + int(zeros_less_one)
    return _signed(codes, bits), _signed(points & (2**bits - 1), bits)


def unpack_awq(weights: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes `[num_out, num_in]` and zero points `[groups, num_out]` of `qweight` `[num_in, num_out / 8]` and
    `qzeros` `[groups, num_out / 8]`."""
    codes, points = (
        _unpack_last(words, _AWQ_BITS).unflatten(1, (-1, len(_AWQ_ORDER)))[..., _AWQ_ORDER].flatten(1)
        for words in (weights, zeros)
    )
    return _signed(codes.t().contiguous(), _AWQ_BITS), _signed(points, _AWQ_BITS)


def unpack_compressed(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Returns `count` signed codes of each row: `weight_packed`, or `weight_zero_point` transposed."""
    return _signed(_unpack_last(words, bits)[:, :count], bits)


def _unpack_last(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned codes of 32-bit words, along the last axis: int16 `[rows, words * 32 / bits]`."""
    # `contiguous` keeps odd strides of axes of length 1, which `view` refuses.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == _WORD_BITS // 4:
        return octets.short()
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).short()


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    half: int = 1 << bits - 1
    return (codes - half).to(torch.int8)


Quantization = Literal["none", "int8", "int4"]
"""int8: a scale for each output. int4: a scale and a zero point for each output and 32 inputs."""

INT4_GROUP = 32  # as in cpu_rounding.c
_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # numbered as in cpu_vectors.c
_ROWS_AT_ONCE = 1024  # bounds the memory of temporary tensors


def quantize(weight: torch.Tensor, quantization: Quantization, importance: torch.Tensor | None = None) -> IntegerWeight:
    """Rounds a weight `[num_out, num_in]`, float32 or bfloat16. `importance` `[num_in]`: what the squared error of each
    input's weights counts in 4 bits; None: the same. On the meta device: the shapes. Raises KernelBuildError if the
    kernels cannot be built here, which round to 4 bits."""
    if quantization == "int4":
        return _to_4_bits(weight.contiguous(), torch.ones(weight.shape[1]) if importance is None else importance)
    parts = [_to_8_bits(rows) for rows in weight.split(_ROWS_AT_ONCE)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return IntegerWeight(codes, scales.t().contiguous(), None, 8, weight.shape[1])


def _to_8_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.float()
    scales = (rows.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    return (rows / divisor).round_().clamp_(-128, 127).to(torch.int8), scales


def _to_4_bits(rows: torch.Tensor, importance: torch.Tensor) -> IntegerWeight:
    """The codes, scales and zero points of the least error among those that the kernel tries."""
    num_out, num_in = rows.shape
    groups = -(-num_in // INT4_GROUP)
    codes = torch.empty_like(rows, dtype=torch.int8)
    scales = rows.new_empty((groups, num_out), dtype=torch.bfloat16)
    zeros = torch.empty_like(scales, dtype=torch.int8)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (rows, importance, codes, scales, zeros)]
    numbers = [ctypes.c_int64(each) for each in (_TYPES[rows.dtype], num_out, num_in, torch.get_num_threads())]
    if not rows.is_meta:
        load_kernel().kvrelay_round_to_int4(*pointers, *numbers)
    return IntegerWeight(codes, scales, zeros, 4, INT4_GROUP)
