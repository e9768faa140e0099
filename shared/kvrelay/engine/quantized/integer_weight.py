"""A linear layer's weight as integers with scales, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
