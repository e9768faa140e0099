"""The forward of a decoder on a GPU: merged products, and one kernel for what lies between two of them.

A layer takes ten kernels in place of about forty of transformers' modules. That matters where a kernel's launch costs
more than its work: in small decoding steps as CUDA graphs, and in steps that the host launches kernel by kernel.
"""

from __future__ import annotations

import torch

from kvrelay.backends.backend import StepAttention
from kvrelay.engine.fused.gpu_weights import GpuWeights


class GpuForward:
    """A `Forward` of one recognised model. The residual stream is float32, whatever the weights' dtype."""

    name = "fused"

    def __init__(self, weights: GpuWeights, pieces: TorchPieces) -> None:
        self._weights = weights
        self._pieces = pieces

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        weights, pieces, count = self._weights, self._pieces, len(token_ids)
        hidden = torch.nn.functional.embedding(token_ids, weights.embedding).float()
        num_heads = (weights.num_heads, weights.num_kv_heads)
        angles, eps, delta = (weights.cos, weights.sin), weights.norm_eps, None
        for index, layer in enumerate(weights.layers):
            normed = pieces.add_and_norm(hidden, delta, layer.input_norm, eps)
            qkv = layer.qkv(normed).view(count, -1, weights.head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            pieces.norm_and_rotate(qkv, norms, angles, positions, num_heads, eps)
            query, key, value = qkv.split((*num_heads, weights.num_kv_heads), dim=1)
            attended = step.attend(index, query, key, value, layer.attention)
            delta = layer.output(attended.reshape(count, -1))
            normed = pieces.add_and_norm(hidden, delta, layer.mlp_norm, eps)
            delta = layer.down(pieces.silu_and_multiply(layer.gate_up(normed)))
        return pieces.add_and_norm(hidden, delta, weights.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits in the model's dtype."""
        return self._weights.head(hidden)


class TorchPieces:
    """What lies between the matrix products of a decoder layer, in plain torch on any device: the oracle of
    `TritonPieces`, and what runs without Triton.

    The residual stream is float32 `[tokens, hidden]`; all else has the model's dtype.
    """

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
