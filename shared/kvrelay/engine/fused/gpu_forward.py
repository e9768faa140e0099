"""The forward of a decoder on a GPU: merged products, and one kernel for what lies between two of them.

A layer takes ten kernels in place of about forty of transformers' modules. That matters where a kernel's launch costs
more than its work: in small decoding steps as CUDA graphs, and in steps that the host launches kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import AttentionParams, StepAttention
from kvrelay.engine.fused.kernel import FIXED_TYPES
from kvrelay.engine.fused.weights import LayerWeights, NotFusable, OwnModules, layer_weights, require_fusable

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """One product for several projections of the same input: `weight` `[num_out, num_in]`, `bias` `[num_out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All that a forward needs. `cos` and `sin` are float32 `[positions, head_dim / 2]`."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights[MergedLinear], ...]  # `gate_up`: the rows of all gates, then those of all values
    norm: torch.Tensor
    head: MergedLinear
    cos: torch.Tensor
    sin: torch.Tensor
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


def merge_weights(model: PreTrainedModel, attention: Sequence[AttentionParams], max_model_len: int) -> GpuWeights:
    """Returns the weights of a model, merged. Its modules keep views of them, so they compute as before.

    `attention`: the attention parameters of each layer. Raises NotFusable for a model of another family, or rotary
    embeddings whose angles depend on more than the position.
    """
    require_fusable(model, attention, device=model.device.type, dtypes=GPU_DTYPES)
    backbone: Any = model.model
    head: Any = model.lm_head
    rope_type = getattr(backbone.rotary_emb, "rope_type", None)
    if rope_type not in FIXED_TYPES:
        raise NotFusable(f"its rotary embeddings of type {rope_type!r} depend on more than the position")
    first = backbone.layers[0]
    head_dim = first.self_attn.head_dim
    positions = torch.arange(max_model_len, device=model.device)
    cos, sin = backbone.rotary_emb(torch.empty(1, device=model.device), positions[None])
    half = head_dim // 2
    return GpuWeights(
        embedding=backbone.embed_tokens.weight.detach(),
        layers=tuple(
            layer_weights(each, params, _pack, torch.Tensor.detach, OwnModules())
            for each, params in zip(backbone.layers, attention, strict=True)
        ),
        norm=backbone.norm.weight.detach(),
        head=merge([head]),
        cos=cos[0, :, :half].float().contiguous(),
        sin=sin[0, :, :half].float().contiguous(),
        norm_eps=float(first.input_layernorm.variance_epsilon),
        num_heads=len(first.self_attn.q_proj.weight) // head_dim,
        num_kv_heads=len(first.self_attn.k_proj.weight) // head_dim,
        head_dim=head_dim,
    )


def _pack(*modules: torch.nn.Linear, **how: bool) -> MergedLinear:
    return merge(modules)


def merge(modules: Sequence[torch.nn.Linear]) -> MergedLinear:
    """Merges modules of the same input. Their parameters become views of the merged ones. Raises NotFusable if some of
    the modules have a bias, and some have none."""
    if len({module.bias is None for module in modules}) != 1:
        raise NotFusable("some of the projections that are merged have a bias, and some have none")
    weight = _merged([module.weight for module in modules])
    biases: list[torch.Tensor] = [module.bias for module in modules if module.bias is not None]
    return MergedLinear(weight, _merged(biases) if biases else None)


def _merged(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0].detach()
    merged = torch.cat([each.detach() for each in parameters])
    for each, part in zip(parameters, merged.split([len(each) for each in parameters]), strict=True):
        each.data = part
    return merged


class GpuForward:
    """A `Forward` of one recognised model. The residual stream is float32, whatever the weights' dtype."""

    name = "fused"

    def __init__(self, weights: GpuWeights, pieces: TorchPieces) -> None:
        self._weights = weights
        self.pieces = pieces

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        weights, pieces, count = self._weights, self.pieces, len(token_ids)
        hidden = torch.nn.functional.embedding(token_ids, weights.embedding).float()
        num_heads = (weights.num_heads, weights.num_kv_heads)
        angles, eps, delta = (weights.cos, weights.sin), weights.norm_eps, None
        for index, layer in enumerate(weights.layers):
            normed = pieces.add_and_norm(hidden, delta, layer.input_norm, eps)
            qkv = pieces.linear(normed, layer.qkv).view(count, -1, weights.head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            pieces.norm_and_rotate(qkv, norms, angles, positions, num_heads, eps)
            query, key, value = qkv.split((*num_heads, weights.num_kv_heads), dim=1)
            attended = step.attend(index, query, key, value, layer.attention)
            delta = pieces.linear(attended.reshape(count, -1), layer.output)
            normed = pieces.add_and_norm(hidden, delta, layer.mlp_norm, eps)
            gate_up = pieces.linear(normed, layer.gate_up)
            delta = pieces.linear(pieces.silu_and_multiply(gate_up), layer.down)
        return pieces.add_and_norm(hidden, delta, weights.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits in the model's dtype."""
        return self.pieces.linear(hidden, self._weights.head)


class TorchPieces:
    """The matrix products of a decoder layer and what lies between them, in plain torch on any device: the oracle of
    `TritonPieces`, and what runs without Triton.

    The residual stream is float32 `[tokens, hidden]`; all else has the model's dtype.
    """

    name = "torch"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, the bits of a token's products do not depend on the number of tokens. Nothing else
        here depends on it: each token is normed, rotated and activated on its own."""
        self.batch_invariant = batch_invariant

    def linear(self, x: torch.Tensor, merged: MergedLinear) -> torch.Tensor:
        """`x @ weight.T + bias` of `x` `[tokens, num_in]`, in its dtype."""
        if self.batch_invariant:
            return self._invariant_linear(x, merged)
        return torch.nn.functional.linear(x, merged.weight, merged.bias)

    def _invariant_linear(self, x: torch.Tensor, merged: MergedLinear) -> torch.Tensor:
        # Libraries choose a kernel by the number of rows, and some of them by the alignment of the first. So each
        # product has one row, in memory of its own.
        rows = [torch.nn.functional.linear(row.clone(), merged.weight, merged.bias) for row in x.split(1)]
        return torch.cat(rows)

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
