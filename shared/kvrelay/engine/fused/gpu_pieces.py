"""What lies between the matrix products of a decoder layer on a GPU, in plain torch: the oracle of `triton_pieces`, and
what runs without Triton."""

from __future__ import annotations

import torch


class TorchPieces:
    """The residual stream is float32 `[tokens, hidden]`; all else has the model's dtype."""

    name = "torch"

    def add_and_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `delta` to `hidden` in place, and returns `rms_norm(hidden) * norm` in the dtype of `norm`."""
        if delta is not None:
            hidden += delta
        return _rms_norm(hidden, norm, eps).to(norm.dtype)

    def norm_and_rotate(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        num_heads: tuple[int, int],
        eps: float,
    ) -> None:
        """Norms (if there are `norms` of queries and keys) and rotates the queries and keys of `qkv`, in place.

        `qkv` is `[tokens, heads, head_dim]` with the queries' heads first, then those of keys, then those of values;
        `num_heads` counts the first two. `angles`: cosines and sines, float32 `[positions, head_dim / 2]`; `positions`:
        the row of each token, `[tokens]` int64.
        """
        cos, sin = (each.index_select(0, positions)[:, None] for each in angles)
        start = 0
        for index, count in enumerate(num_heads):
            part = qkv[:, start : start + count]
            x = part.float() if norms is None else _rms_norm(part.float(), norms[index], eps)
            first, second = x.chunk(2, dim=-1)
            part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
            start += count

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up` `[tokens, 2 * width]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)


def _rms_norm(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
