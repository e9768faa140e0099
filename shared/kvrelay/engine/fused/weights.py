"""Recognises decoders whose layers the fused kernels compute, and packs their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import AttentionParams
from kvrelay.backends.host_pages import HugePages, release_freed_memory
from kvrelay.engine.fused.panels import PackedLinear, pack, pack_integers, share_layout, unpack
from kvrelay.engine.load.integer_weight import IntegerWeight, Quantization, quantize

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of transformers whose layers are: RMSNorm, rotary attention, RMSNorm, SiLU-gated MLP, with two residuals."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types of activations that the kernels multiply, in the order of their numbers in cpu_vectors.c."""

Linear = TypeVar("Linear")  # the packed form of linear layers that have the same input
ReadInteger = Callable[[], IntegerWeight]


class NotFusable(Exception):
    """The fused kernels do not compute some part of the model; the message names the part."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Linear]):
    """One decoder layer. `query_norm` and `key_norm` (`[head_dim]`) exist in some families."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention: AttentionParams
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class OwnModules:
    """What a rank has of a model. `layers`: None: all; `has_head`: also the final norm; `adds_biases`,
    `adds_mlp_biases`: of the ranks that divide heads, or MLPs, one adds the biases of products that are summed over
    them."""

    layers: range | None = None
    has_embedding: bool = True
    has_head: bool = True
    adds_biases: bool = True
    adds_mlp_biases: bool = True


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a forward needs. `rotary(x, position_ids)` gives cos and sin, `[1, tokens, head_dim]`. Heads and widths
    are this rank's."""

    dtype: torch.dtype
    embedding: torch.Tensor | None  # None: the head's weights, which are not rounded, or another rank's
    layers: tuple[LayerWeights[PackedLinear], ...]  # norms are float32
    norm: torch.Tensor | None  # None, as the head: another rank has it
    head: PackedLinear | None
    rotary: torch.nn.Module
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return len(self.layers[0].input_norm)

    @property
    def linears(self) -> list[PackedLinear]:
        """All linear layers, the head last."""
        inside = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return inside if self.head is None else [*inside, self.head]


class WeightPacker:
    """Packs the weights of a model's linear layers, one layer after another, and takes the memory of each from its
    module: the model does not exist twice. `restore` gives the modules their weights back."""

    def __init__(
        self, quantization: Quantization = "none", stored: Mapping[torch.nn.Linear, ReadInteger] | None = None
    ) -> None:
        """`stored` reads the weights that are integers in the checkpoint. Their modules have them as floats."""
        self.quantization = quantization
        self.importance: dict[torch.nn.Linear, torch.Tensor] = {}
        """What the squared errors of each input's weights count, for `quantize`."""
        self._stored = stored or {}
        self._memory = HugePages()
        self._packed: list[tuple[PackedLinear, tuple[torch.nn.Linear, ...], list[int]]] = []

    def pack(
        self, *modules: torch.nn.Linear, gated: bool = False, has_bias: bool = True, needs_8_bits: bool = False
    ) -> PackedLinear:
        """One product for several of the same input. Without `has_bias`, other ranks add the biases. `needs_8_bits`:
        rounded to 4 it would cost the model too much."""
        if len({module.bias is None for module in modules}) != 1:
            raise NotFusable("some of the projections that are merged have a bias, and some have none")
        biases = [module.bias.detach() for module in modules if module.bias is not None and has_bias]
        num_out = [len(module.weight) for module in modules]
        integers = self._stored_integers(modules) or self._rounded(modules, needs_8_bits=needs_8_bits)
        if integers:
            packed = pack_integers(integers, biases or None, modules[0].weight.dtype, gated=gated)
        else:
            packed = pack([module.weight.detach() for module in modules], biases or None, gated=gated)
        packed = replace(packed, panels=self._memory.place(packed.panels))
        for module in modules:
            module.weight.data = module.weight.new_empty(0)
        release_freed_memory()
        self._packed.append((packed, modules, num_out))
        return packed

    def _stored_integers(self, modules: tuple[torch.nn.Linear, ...]) -> list[IntegerWeight]:
        """The checkpoint's integers as they are; empty if some weight has none, or the panels do not hold them."""
        if not all(module in self._stored for module in modules):
            return []
        weights = [self._stored[module]() for module in modules]
        return weights if share_layout(weights) else []

    def _rounded(self, modules: tuple[torch.nn.Linear, ...], *, needs_8_bits: bool) -> list[IntegerWeight]:
        if self.quantization == "none":
            return []
        quantization = "int8" if needs_8_bits else self.quantization
        return [quantize(each.weight.detach(), quantization, self.importance.get(each)) for each in modules]

    def balance(self, norm: Any, *modules: torch.nn.Linear) -> None:
        """Before weights that follow a norm are rounded to 4 bits: multiplies those of important inputs, which are
        rounded finer then, and divides the norm's by the same numbers, as AWQ does."""
        if self.quantization != "int4" or modules[0] not in self.importance:
            return
        importance = self.importance[modules[0]]
        factors = (importance / importance.mean().clamp(min=1e-30)).clamp_(min=1e-4).pow_(0.25)
        norm.weight.data = norm.weight.float() / factors
        for module in modules:
            module.weight.data = (module.weight.float() * factors).to(module.weight.dtype)
            self.importance[module] = importance / factors.square()

    @property
    def num_kept(self) -> int:
        """The number of modules whose weights are packed as the checkpoint's integers."""
        return sum(len(modules) for packed, modules, _ in self._packed if packed.is_integer) if self._stored else 0

    def restore(self) -> None:
        """Restores the modules' weights bit by bit. The packed weights cannot be used afterwards. Raises ValueError if
        the weights were rounded."""
        if self.quantization != "none" and self._packed:
            raise ValueError(f"weights in {self.quantization} do not give the modules theirs back")
        while self._packed:
            packed, modules, num_out = self._packed.pop()
            if packed.is_integer:
                weights = [self._stored[module]().dequantize(module.weight.dtype) for module in modules]
            else:
                weights = unpack(packed, num_out)
            for module, weight in zip(modules, weights, strict=True):
                module.weight.data = weight


def decoder_weights(
    model: PreTrainedModel, attention: Sequence[AttentionParams], packer: WeightPacker, own: OwnModules | None = None
) -> DecoderWeights:
    """Returns the weights of a model that is fusable (see `require_fusable`) in the kernels' layout. `own`: those that
    this rank has; None: all.

    The modules lose their weights to `packer`, also if this raises: see `WeightPacker.restore`. Raises NotFusable if
    some of the projections that are merged have a bias, and some have none.
    """
    backbone: Any = model.model
    dtype = model.dtype
    own = own or OwnModules()
    modules = _own_layers(backbone, own)
    first = modules[0]
    head_dim = first.self_attn.head_dim
    num_heads, num_kv_heads = (
        len(each.weight) // head_dim for each in (first.self_attn.q_proj, first.self_attn.k_proj)
    )
    intermediate_size = len(_plain_mlp(first.mlp).gate_proj.weight)
    # Packing a tied head empties the parameter.
    embedding = backbone.embed_tokens.weight.detach() if own.has_embedding else None
    head: Any = _plain_head(model.lm_head) if own.has_head else None
    tied = head is not None and own.has_embedding and head.weight is backbone.embed_tokens.weight
    layers = []
    for each, params in zip(modules, attention, strict=True):
        projections, mlp = each.self_attn, _plain_mlp(each.mlp)
        packer.balance(each.input_layernorm, projections.q_proj, projections.k_proj, projections.v_proj)
        packer.balance(each.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        layers.append(layer_weights(each, params, packer.pack, _floats, own))
    packed_head = None if head is None else packer.pack(head, needs_8_bits=True)
    shares_head = tied and packed_head is not None and not packed_head.is_integer
    return DecoderWeights(
        dtype=dtype,
        embedding=None if shares_head else embedding,
        layers=tuple(layers),
        norm=_floats(backbone.norm.weight) if own.has_head else None,
        head=packed_head,
        rotary=backbone.rotary_emb,
        norm_eps=float(first.input_layernorm.variance_epsilon),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )


def _own_layers(backbone: Any, own: OwnModules) -> list[Any]:
    layers = list(backbone.layers)
    return layers if own.layers is None else [layers[index] for index in own.layers]


def _plain_head(head: Any) -> Any:
    """The linear layer inside a head of several ranks."""
    while not isinstance(head, torch.nn.Linear):
        head = head.head
    return head


def _plain_mlp(mlp: Any) -> Any:
    """The MLP inside one that gathers the tokens of several ranks."""
    while not hasattr(mlp, "gate_proj"):
        mlp = mlp.mlp
    return mlp


def require_fusable(
    model: PreTrainedModel,
    attention: Sequence[AttentionParams],
    own: OwnModules | None = None,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Raises NotFusable for a model of another family, for weights of other `dtypes` or on another type of `device`, or
    for a layer that differs from the family.

    `attention`: the attention parameters of each layer; `own`: see `decoder_weights`.
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
        if parameter.dtype not in dtypes or parameter.dtype != model.dtype or parameter.device.type != device:
            raise NotFusable(f"{path} is {parameter.dtype} on {parameter.device.type}")
    backbone: Any = model.model
    norms: list[Any] = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    if len(epsilons) != 1:
        raise NotFusable(f"its norms have several epsilons: {sorted(epsilons)}")
    probe = torch.zeros(1, 1, 1, device=model.device)
    cos, _ = backbone.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    if cos.shape[-1] != _own_layers(backbone, own or OwnModules())[0].self_attn.head_dim:
        raise NotFusable(f"it rotates {cos.shape[-1]} elements of each head, not all of them")


def layer_weights(
    layer: Any,
    attention: AttentionParams,
    pack: Callable[..., Linear],
    norm: Callable[[torch.Tensor], torch.Tensor],
    own: OwnModules,
) -> LayerWeights[Linear]:
    """Returns a layer's weights: of linear modules by `pack`, called as `WeightPacker.pack` is, of norms by `norm`."""
    attn, mlp = layer.self_attn, _plain_mlp(layer.mlp)
    normed = hasattr(attn, "q_norm")
    return LayerWeights(
        input_norm=norm(layer.input_layernorm.weight),
        qkv=pack(attn.q_proj, attn.k_proj, attn.v_proj),
        query_norm=norm(attn.q_norm.weight) if normed else None,
        key_norm=norm(attn.k_norm.weight) if normed else None,
        attention=attention,
        output=pack(attn.o_proj, has_bias=own.adds_biases),
        mlp_norm=norm(layer.post_attention_layernorm.weight),
        gate_up=pack(mlp.gate_proj, mlp.up_proj, gated=True),
        down=pack(mlp.down_proj, has_bias=own.adds_mlp_biases, needs_8_bits=True),
    )


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().contiguous()
