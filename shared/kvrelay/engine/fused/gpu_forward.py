"""The forward of a decoder on a GPU: merged products, and one kernel for what lies between two of them.

A layer takes ten kernels in place of about forty of transformers' modules. That matters where a kernel's launch costs
more than its work: in small decoding steps as CUDA graphs, and in steps that the host launches kernel by kernel.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvrelay.backends.backend import StepAttention
from kvrelay.engine.fused.gpu_pieces import TorchPieces
from kvrelay.engine.fused.gpu_weights import GpuWeights


def choose_pieces(device: torch.device) -> TorchPieces:
    """Triton's kernels if Triton is installed and the device is a GPU, else plain torch."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TorchPieces()
    from kvrelay.engine.fused.triton_pieces import TritonPieces

    return TritonPieces()


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
