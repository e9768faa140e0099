"""Weights of linear layers in the panels of backends/cpu_panels.c, which the kernels read as one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.load.integer_weight import IntegerWeight

PANEL = 32
"""Columns of a panel."""

_K_MULTIPLE = 32  # rows of a bfloat16 panel are padded to it
FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 8, 9
"""Formats of weights, numbered as in cpu_linear.c."""

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
SCALE_TYPES = {**TYPES, torch.float16: 4}
"""Types of scales, numbered as in cpu_linear.c."""

_SUM_BLOCK = 512  # rows of K that the kernels sum at once


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer `x @ weight.T + bias`, or several of the same input side by side, as the kernels read it.

    `gated`: the columns of two layers alternate by halves of a panel, gate first, and the kernel stores
    `silu(gate) * up`.
    """

    # Of floats: [panels, K, PANEL]. Of bfloat16, in pairs: [panels, K / 2, PANEL, 2]. Integers: the same order in
    # bytes, or two of them in a byte.
    panels: torch.Tensor
    bias: torch.Tensor | None  # float32 [panels * PANEL]
    num_out: int
    num_in: int
    gated: bool = False
    format: int = FLOAT32
    scales: torch.Tensor | None = None  # [panels, groups, PANEL] of one of SCALE_TYPES, of integer weights
    group: int = 0  # rows of K that share a scale and a zero point
    zeros: torch.Tensor | None = None  # int8 of the scales' shape, subtracted from the integers; None: all are 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights with their scales and zero points."""
        return self.panels.nbytes + sum(each.nbytes for each in (self.scales, self.zeros) if each is not None)

    @property
    def is_integer(self) -> bool:
        """Returns whether the weights are integers with scales."""
        return self.scales is not None


def pack(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    *,
    gated: bool = False,
) -> PackedLinear:
    """Packs weights `[num_out, num_in]` of one input side by side; two of the same shape if `gated`."""
    rows = order(weights, gated=gated)
    bias = _bias(biases, gated=gated)
    shape = (sum(len(weight) for weight in weights), rows.shape[1])
    return PackedLinear(to_panels(rows), bias, *shape, gated=gated, format=TYPES[rows.dtype], group=rows.shape[1])


def pack_integers(
    weights: Sequence[IntegerWeight],
    biases: Sequence[torch.Tensor] | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> PackedLinear:
    """Packs weights that `share_layout` for activations of `dtype`, as they are. Otherwise like `pack`."""
    first = weights[0]
    panels = to_panels(order([each.codes for each in weights], gated=gated), in_pairs=dtype == torch.bfloat16)
    number = INT8
    if first.bits == 4:
        panels, number = _two_in_a_byte(panels), INT4
    scales = _by_panel([each.scales for each in weights], gated=gated)
    zeros = None
    if any(each.zeros is not None for each in weights):
        zeros = _by_panel([each.zero_points for each in weights], gated=gated)
    return PackedLinear(
        panels,
        _bias(biases, gated=gated),
        sum(len(each.codes) for each in weights),
        first.num_in,
        gated=gated,
        format=number,
        scales=scales,
        group=first.group,
        zeros=zeros,
    )


def share_layout(weights: Sequence[IntegerWeight]) -> bool:
    """Returns whether the panels hold these weights exactly, side by side."""
    kinds = {(each.bits, each.group, each.scales.dtype) for each in weights}
    return len(kinds) == 1 and all(each.group_of_input is None and _fits(each.group, each.num_in) for each in weights)


def _fits(group: int, num_in: int) -> bool:
    """Groups begin where the kernels begin to sum, and a pair of rows has one scale."""
    return group >= num_in or (group % 2 == 0 and (group <= _SUM_BLOCK or group % _SUM_BLOCK == 0))


def _bias(biases: Sequence[torch.Tensor] | None, *, gated: bool) -> torch.Tensor | None:
    if biases is None:
        return None
    return order([each[:, None] for each in biases], gated=gated)[:, 0].float().contiguous()


def _by_panel(values: Sequence[torch.Tensor], *, gated: bool) -> torch.Tensor:
    """Values `[groups, num_out]` of each weight as `[panels, groups, PANEL]`."""
    return to_panels(order([each.t() for each in values], gated=gated), in_pairs=False)


def _two_in_a_byte(panels: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, biased by 8. A byte has one of the first half of a panel's columns and one of the second."""
    low, high = (panels.flatten(2) + 8).to(torch.uint8).chunk(2, dim=2)
    return low | (high << 4)


def order(weights: Sequence[torch.Tensor], *, gated: bool) -> torch.Tensor:
    """The rows of the weights in the order of the panels' columns, padded with zeros to whole panels."""
    if not gated:
        return _pad_rows(torch.cat(list(weights)), PANEL)
    halves = [_pad_rows(weight, PANEL // 2).view(-1, PANEL // 2, weight.shape[1]) for weight in weights]
    return torch.stack(halves, dim=1).flatten(0, 2)


def to_panels(rows: torch.Tensor, *, in_pairs: bool | None = None) -> torch.Tensor:
    """Packs rows `[panels * PANEL, num_in]`, `in_pairs` if they meet bfloat16 activations; by default if they are
    bfloat16."""
    if not (rows.dtype == torch.bfloat16 if in_pairs is None else in_pairs):
        return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _K_MULTIPLE))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def from_panels(packed: PackedLinear) -> torch.Tensor:
    """The rows that `to_panels` packed: `[panels * PANEL, num_in]`."""
    transposed = packed.panels.transpose(1, 2)
    return transposed.reshape(len(packed.panels) * PANEL, -1)[:, : packed.num_in]


def rows_of(packed: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """Some of the rows that `pack` was given, `[rows, num_in]`, of formats that are neither gated nor integers."""
    # A row's elements, or pairs of them, are a column of its panel.
    found = packed.panels[rows // PANEL, :, rows % PANEL]
    return found.reshape(len(rows), -1)[:, : packed.num_in].contiguous()


def unpack(packed: PackedLinear, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The weights that `pack` was given, by their numbers of rows. Exact, of formats that are not integers."""
    rows = from_panels(packed)
    if not packed.gated:
        return [part.contiguous() for part in rows[: packed.num_out].split(list(sizes))]
    halves = rows.view(-1, 2, PANEL // 2, packed.num_in)
    return [halves[:, half].reshape(-1, packed.num_in)[:size].contiguous() for half, size in enumerate(sizes)]


def _pad_rows(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % multiple))
