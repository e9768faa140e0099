"""Merges the weights of a decoder's linear layers for the fused forward on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import AttentionParams
from kvrelay.engine.fused.angles import FIXED_TYPES
from kvrelay.engine.fused.weights import LayerWeights, NotFusable, OwnModules, layer_weights, require_fusable

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """One product for several projections of the same input: `weight` `[num_out, num_in]`, `bias` `[num_out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


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

    `attention`: the attention parameters of each layer.

    Raises:
        NotFusable: the model is of another family or has rotary embeddings whose angles depend on more than the
            position.
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


def _pack(*modules: torch.nn.Linear, gated: bool = False, has_bias: bool = True) -> MergedLinear:
    return merge(modules)


def merge(modules: Sequence[torch.nn.Linear]) -> MergedLinear:
    """Merges modules of the same input. Their parameters become views of the merged ones.

    Raises:
        NotFusable: some of the modules have a bias, and some have none.
    """
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
