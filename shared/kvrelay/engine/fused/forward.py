"""The forward of a decoder over fused kernels: all layers in one call for a few tokens, piece by piece for many."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvrelay.backends.backend import StepAttention
from kvrelay.backends.cpu import CpuStep
from kvrelay.engine.fused.kernel import DecoderKernel
from kvrelay.engine.fused.weights import DecoderWeights, LinearWeights

MAX_FEW_TOKENS = 32
"""Up to this number of tokens the kernels' own matrix products are used: reading the weights takes most of the time.
Beyond it torch's are faster."""


class FusedForward:
    """A `Forward` of one recognised model. The residual stream is float32, whatever the weights' type."""

    name = "fused"

    def __init__(self, weights: DecoderWeights) -> None:
        """Builds or loads the kernels.

        Raises:
            KernelBuildError: the kernels cannot be built here.
        """
        self._weights = weights
        self._kernel = DecoderKernel(weights)

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        weights = self._weights
        hidden = functional.embedding(token_ids, weights.embedding).float()
        cos, sin = (
            each[0, :, : weights.head_dim // 2].contiguous() for each in weights.rotary(hidden[None], positions[None])
        )
        call = step.call_from_c(weights.num_heads, weights.dtype) if isinstance(step, CpuStep) else None
        if call is not None and len(hidden) <= MAX_FEW_TOKENS:
            self._kernel.layers(hidden, cos, sin, call)
            delta = None
        else:
            delta = self._run_layers(hidden, cos, sin, step)
        out = torch.empty(hidden.shape, dtype=weights.dtype)
        self._kernel.add_and_norm(hidden, delta, weights.norm, out)
        return out

    def _run_layers(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepAttention
    ) -> torch.Tensor | None:
        """All layers, piece by piece; returns the last MLP's output, which is not added to `hidden` yet."""
        weights, kernel, count = self._weights, self._kernel, len(hidden)
        normed = torch.empty(hidden.shape, dtype=weights.dtype)
        activated = torch.empty(count, weights.intermediate_size, dtype=weights.dtype)
        num_heads = (weights.num_heads, weights.num_kv_heads, weights.num_kv_heads)
        delta = None
        for index, layer in enumerate(weights.layers):
            kernel.add_and_norm(hidden, delta, layer.input_norm, normed)
            qkv = self._product(layer.qkv, normed)
            kernel.norm_and_rotate(index, qkv, cos, sin)
            query, key, value = qkv.view(count, -1, weights.head_dim).split(num_heads, dim=1)
            attended = step.attend(index, query, key, value, layer.attention)
            delta = self._product(layer.output, attended.view(count, -1))
            kernel.add_and_norm(hidden, delta, layer.mlp_norm, normed)
            kernel.silu_and_multiply(self._product(layer.gate_up, normed), activated)
            delta = self._product(layer.down, activated)
        return delta

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward.logits`: float32, which saves the rounding of 16-bit logits."""
        return self._product(self._weights.head, hidden.contiguous(), torch.float32)

    def _product(self, linear: LinearWeights, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x @ weight.T + bias` in the weights' type, or in `dtype`."""
        if len(x) > MAX_FEW_TOKENS:
            return functional.linear(x, linear.weight, linear.bias).to(dtype or x.dtype)
        out = torch.empty(len(x), len(linear.weight), dtype=dtype or x.dtype)
        self._kernel.linear(linear, x, out)
        return out
