"""Recognises decoders whose layers the fused kernels compute, and packs their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import AttentionParams
from kvrelay.engine.fused.panels import PackedLinear, pack, pack_integers, share_layout, unpack
from kvrelay.engine.fused.quantization import Quantization
from kvrelay.engine.quantized.integer_weight import IntegerWeight

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of transformers whose layers are: RMSNorm, rotary attention, RMSNorm, SiLU-gated MLP, with two residuals."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types of activations that the kernels multiply, in the order of their numbers in cpu_vectors.c."""

ReadInteger = Callable[[], IntegerWeight]


class NotFusable(Exception):
    """The fused kernels do not compute some part of the model; the message names the part."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are float32; `query_norm` and `key_norm` (`[head_dim]`) exist in some families."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention: AttentionParams
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a forward needs. `rotary(x, position_ids)` gives cos and sin, `[1, tokens, head_dim]`."""

    dtype: torch.dtype
    embedding: torch.Tensor | None  # None: the head's weights, which are not rounded
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: PackedLinear
    rotary: torch.nn.Module
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return len(self.norm)

    @property
    def linears(self) -> list[PackedLinear]:
        """All linear layers, the head last."""
        inside = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*inside, self.head]


class WeightPacker:
    """Packs the weights of a model's linear layers, one layer after another, and takes the memory of each from its
    module: the model does not exist twice. `restore` gives the modules their weights back."""

    def __init__(
        self, quantization: Quantization = "none", stored: Mapping[torch.nn.Linear, ReadInteger] | None = None
    ) -> None:
        """`stored` reads the weights that are integers in the checkpoint. Their modules have them as floats."""
        self.quantization = quantization
        self._stored = stored or {}
        self._packed: list[tuple[PackedLinear, tuple[torch.nn.Linear, ...]]] = []

    def pack(self, *modules: torch.nn.Linear, gated: bool = False) -> PackedLinear:
        """One product for several of the same input."""
        if len({module.bias is None for module in modules}) != 1:
            raise NotFusable("some of the projections that are merged have a bias, and some have none")
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        packed = self._pack_stored(modules, biases, gated) or pack(
            [module.weight.detach() for module in modules], biases or None, gated=gated, quantization=self.quantization
        )
        for module in modules:
            module.weight.data = module.weight.new_empty(0)
        self._packed.append((packed, modules))
        return packed

    def _pack_stored(
        self, modules: tuple[torch.nn.Linear, ...], biases: list[torch.Tensor], gated: bool
    ) -> PackedLinear | None:
        """The checkpoint's integers as they are; None if some weight has none, or the panels do not hold them."""
        if not all(module in self._stored for module in modules):
            return None
        weights = [self._stored[module]() for module in modules]
        if not share_layout(weights):
            return None
        return pack_integers(weights, biases or None, modules[0].weight.dtype, gated=gated)

    @property
    def num_kept(self) -> int:
        """The number of modules whose weights are packed as the checkpoint's integers."""
        return sum(len(modules) for packed, modules in self._packed if packed.is_integer) if self._stored else 0

    def restore(self) -> None:
        """Gives the modules their weights back, bit by bit. What was packed is of no use afterwards.

        Raises:
            ValueError: the weights were rounded.
        """
        if self.quantization != "none" and self._packed:
            raise ValueError(f"weights in {self.quantization} do not give the modules theirs back")
        while self._packed:
            packed, modules = self._packed.pop()
            if packed.is_integer:
                weights = [self._stored[module]().dequantize(module.weight.dtype) for module in modules]
            else:
                weights = unpack(packed, [each.out_features for each in modules])
            for module, weight in zip(modules, weights, strict=True):
                module.weight.data = weight


def decoder_weights(
    model: PreTrainedModel, attention: Sequence[AttentionParams], packer: WeightPacker
) -> DecoderWeights:
    """Returns the weights of a model that is fusable (see `require_fusable`) in the kernels' layout.

    The modules lose their weights to `packer`, also if this raises: see `WeightPacker.restore`.

    Raises:
        NotFusable: some of the projections that are merged have a bias, and some have none.
    """
    backbone: Any = model.model
    dtype = model.dtype
    layers = tuple(_layer(each, params, packer) for each, params in zip(backbone.layers, attention, strict=True))
    config = model.config
    head: Any = model.lm_head
    tied = head.weight is backbone.embed_tokens.weight
    embedding = backbone.embed_tokens.weight.detach()  # packing a tied head empties the parameter
    packed_head = packer.pack(head)
    return DecoderWeights(
        dtype=dtype,
        embedding=None if tied and not packed_head.is_integer else embedding,
        layers=layers,
        norm=_floats(backbone.norm.weight),
        head=packed_head,
        rotary=backbone.rotary_emb,
        norm_eps=float(backbone.norm.variance_epsilon),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=backbone.layers[0].self_attn.head_dim,
        intermediate_size=config.intermediate_size,
    )


def require_fusable(model: PreTrainedModel, attention: Sequence[AttentionParams]) -> None:
    """Raises NotFusable for a model of another family, dtype or device, or with a layer that differs from the family.

    `attention`: the attention parameters of each layer.
    """
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


def _layer(layer: Any, attention: AttentionParams, packer: WeightPacker) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attn, "q_norm")
    return LayerWeights(
        input_norm=_floats(layer.input_layernorm.weight),
        qkv=packer.pack(attn.q_proj, attn.k_proj, attn.v_proj),
        query_norm=_floats(attn.q_norm.weight) if normed else None,
        key_norm=_floats(attn.k_norm.weight) if normed else None,
        attention=attention,
        output=packer.pack(attn.o_proj),
        mlp_norm=_floats(layer.post_attention_layernorm.weight),
        gate_up=packer.pack(mlp.gate_proj, mlp.up_proj, gated=True),
        down=packer.pack(mlp.down_proj),
    )


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().contiguous()
