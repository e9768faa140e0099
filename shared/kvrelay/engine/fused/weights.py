"""Recognises decoders whose layers the fused kernels compute, and merges the weights that are multiplied together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import AttentionParams

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of transformers whose layers are: RMSNorm, rotary attention, RMSNorm, SiLU-gated MLP, with two residuals."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types of weights that the kernels multiply, in the order of their numbers in cpu_kernel.c."""


class NotFusable(Exception):
    """The fused kernels do not compute some part of the model; the message names the part."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A matrix product `x @ weight.T + bias`; `weight` is `[num_out, num_in]`, contiguous."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are float32; `query_norm` and `key_norm` (`[head_dim]`) exist in some families."""

    input_norm: torch.Tensor
    qkv: LinearWeights
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention: AttentionParams
    output: LinearWeights
    mlp_norm: torch.Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a forward needs. `rotary(x, position_ids)` gives cos and sin, `[1, tokens, head_dim]`."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: LinearWeights
    rotary: torch.nn.Module
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.embedding.dtype

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return self.embedding.shape[1]


def decoder_weights(model: PreTrainedModel, attention: Sequence[AttentionParams]) -> DecoderWeights:
    """Returns the model's weights in the kernels' layout. `attention`: the attention parameters of each layer.

    Merged weights replace those of the modules, which keep views: the model stays usable and takes no more memory.

    Raises:
        NotFusable: the model is of another family, dtype or device, or one of its layers differs from the family.
    """
    _check(model, attention)
    backbone: Any = model.model
    layers = tuple(_layer(each, params) for each, params in zip(backbone.layers, attention, strict=True))
    config = model.config
    head: Any = model.lm_head
    return DecoderWeights(
        embedding=backbone.embed_tokens.weight.detach(),
        layers=layers,
        norm=_floats(backbone.norm.weight),
        head=_linear(head),
        rotary=backbone.rotary_emb,
        norm_eps=float(backbone.norm.variance_epsilon),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=backbone.layers[0].self_attn.head_dim,
        intermediate_size=config.intermediate_size,
    )


def _check(model: PreTrainedModel, attention: Sequence[AttentionParams]) -> None:
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        raise NotFusable(f"{name} is not one of {', '.join(sorted(FAMILIES))}")
    if model.config.hidden_act != "silu":
        raise NotFusable(f"its MLP's activation is {model.config.hidden_act!r}, not 'silu'")
    if any(params.sinks is not None for params in attention):
        raise NotFusable("its attention has sinks")
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear:
            raise NotFusable(f"{path} is a {type(module).__name__}, not a plain linear layer")
    for path, parameter in model.named_parameters():
        if parameter.dtype not in DTYPES or parameter.dtype != model.dtype or parameter.device.type != "cpu":
            raise NotFusable(f"{path} is {parameter.dtype} on {parameter.device.type}")
    backbone: Any = model.model
    norms: list[Any] = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    if len(epsilons) != 1:
        raise NotFusable(f"its norms have several epsilons: {sorted(epsilons)}")
    probe = torch.zeros(1, 1, 1)
    cos, _ = backbone.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.int64))
    if cos.shape[-1] != backbone.layers[0].self_attn.head_dim:
        raise NotFusable(f"it rotates {cos.shape[-1]} elements of each head, not all of them")


def _layer(layer: Any, attention: AttentionParams) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attn, "q_norm")
    return LayerWeights(
        input_norm=_floats(layer.input_layernorm.weight),
        qkv=_merge(attn.q_proj, attn.k_proj, attn.v_proj),
        query_norm=_floats(attn.q_norm.weight) if normed else None,
        key_norm=_floats(attn.k_norm.weight) if normed else None,
        attention=attention,
        output=_linear(attn.o_proj),
        mlp_norm=_floats(layer.post_attention_layernorm.weight),
        gate_up=_merge(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: torch.nn.Linear) -> LinearWeights:
    bias = None if module.bias is None else module.bias.detach()
    return LinearWeights(module.weight.detach().contiguous(), bias)


def _merge(*modules: torch.nn.Linear) -> LinearWeights:
    """One product for several of the same input. The modules' weights become views of the merged one."""
    if len({module.bias is None for module in modules}) != 1:
        raise NotFusable("some of the projections that are merged have a bias, and some have none")
    weight = torch.cat([module.weight.detach() for module in modules])
    for module, part in zip(modules, weight.split([module.out_features for module in modules]), strict=True):
        module.weight.data = part
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return LinearWeights(weight, torch.cat(biases) if biases else None)


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().contiguous()
