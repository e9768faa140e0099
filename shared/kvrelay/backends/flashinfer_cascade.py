"""Cascade attention through FlashInfer: a group's queries over their shared blocks, each row's over its own, merged.

The shared blocks are one row of a prefill without a causal mask, because all of their keys come before all of the
queries. The kernel must be the one that packs the queries of a group of heads and splits long rows. See `cascade` for
what is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.backends.cascade import CascadePlan

_MAX_ELEMENTS = 8192  # elements of one block of the merging kernel: it has a thread for 8, and 1024 threads


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """A step's cascade plan, with the parts that kernels read on the device."""

    plan: CascadePlan
    prefix_ids: torch.Tensor
    suffix_ids: torch.Tensor
    order: torch.Tensor | None  # None: the order of the rows is unchanged


@dataclass(frozen=True, slots=True)
class CascadeDecode:
    """Two planned wrappers, with the interface of the decode kernel's wrapper."""

    prefix: Any
    suffix: Any
    merge: Callable[..., None]
    rows: PlacedRows

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        """Attends with `query`, `[rows, num_heads, head_dim]`, and writes the result to `out`."""
        order = self.rows.order
        if order is None:
            self._attend(query, cache, out)
            return
        placed = query.index_select(0, order)
        placed_out = torch.empty_like(placed)
        self._attend(placed, cache, placed_out)
        out.index_copy_(0, order, placed_out)

    def _attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        count = self.rows.plan.num_shared
        shared = torch.empty((count, *query.shape[1:]), dtype=query.dtype, device=query.device)
        _, sums = self.suffix.run(query, cache, out=out, return_lse=True)
        _, shared_sums = self.prefix.run(query[:count], cache, out=shared, return_lse=True)
        num_heads = merged_heads(*query.shape[1:])
        outputs = (each.view(-1, num_heads, each.shape[-1]) for each in (out[:count], shared))
        logs = (each.view(-1, num_heads) for each in (sums[:count], shared_sums))
        (v, v_other), (s, s_other) = outputs, logs
        self.merge(v, s, v_other, s_other)


def merged_heads(num_heads: int, head_dim: int) -> int:
    """The number of heads to merge at a time: as many as fit a thread block, and divide the number of heads."""
    fitting = min(num_heads, _MAX_ELEMENTS // head_dim)
    return max(count for count in range(1, fitting + 1) if num_heads % count == 0)
