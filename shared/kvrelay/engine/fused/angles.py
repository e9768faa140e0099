"""The cosines and sines of rotary embeddings, kept by position: a step looks them up instead of computing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings whose angles depend on the position alone. `dynamic` and `longrope` look at the longest
position of a step."""

_FIRST, _MOST = 2048, 1 << 15  # positions in the table


@dataclass(frozen=True, slots=True)
class Angles:
    """`cos` and `sin`, float32 `[angles, head_dim / 2]`, and each token's row there, `[tokens]` int64."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


class AngleTable:
    """The angles of a model's rotary module `rotary(x, position_ids)`. Not thread-safe: steps use it one at a time."""

    def __init__(self, rotary: Any, half: int) -> None:
        """`half` is half of `head_dim`."""
        self._rotary = rotary
        self._half = half
        self._is_fixed = getattr(rotary, "rope_type", None) in FIXED_TYPES
        self._cos = self._sin = torch.empty(0, half)

    def at(self, positions: torch.Tensor) -> Angles:
        """The angles at positions `[tokens]` int64."""
        longest = int(positions.numpy().max(initial=0))
        if not self._is_fixed or longest >= _MOST:
            return Angles(*self._compute(positions), torch.arange(len(positions)))
        if longest >= len(self._cos):
            size = max(_FIRST, 1 << longest.bit_length())
            self._cos, self._sin = self._compute(torch.arange(size))
        return Angles(self._cos, self._sin, positions)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(torch.empty(1), positions[None])
        return cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()
