"""How large a model's parts on its ranks are, from its config alone: the worker's own load on torch's meta device,
which has shapes and no values. It takes no weights, no memory and no GPU, and a second beside the import of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from kvrelay.backends.backend import KVLayout
from kvrelay.engine.fused.weights import DecoderWeights, NotFusable, WeightPacker, decoder_weights, require_fusable
from kvrelay.engine.load.causal_model import on_meta
from kvrelay.engine.load.integer_weight import IntegerWeight
from kvrelay.engine.load.model_source import DTYPES, ModelSource, check_divisible
from kvrelay.engine.load.probe import ObservedLayers, observe_layers
from kvrelay.engine.load.stored_weights import StoredFormat, stated_quantization
from kvrelay.engine.parallel.model_part import PartPlan, own_modules, plan_part, plan_place
from kvrelay.engine.run.attention import UnsupportedModel

SAMPLED_BYTES = 96
"""Bytes a token of the vocabulary and a row take while the largest step samples: its logits in float32, and with top_p
all of them sorted, with their numbers and running sums in 64 bits. Measured: 62 to 89."""


_COPIES_TO_PACK = 2


@dataclass(frozen=True, slots=True)
class RankSize:
    """In bytes. `loading`: the most memory of the host that the weights take while they are loaded, without pages of
    the checkpoint's file, which the system may drop. `held`: weights as steps read them. `step`: an estimate of what
    the largest step takes, which a worker with a share of the memory measures at start."""

    loading: int
    held: int
    step: int
    layout: KVLayout
    total_kv_heads: int

    @property
    def kv_of_all_heads(self) -> int:
        """Bytes a token in this rank's layers, of the heads of all ranks."""
        return self.layout.block_bytes // self.layout.block_size * self.total_kv_heads // self.layout.num_kv_heads


def size_ranks(
    source: ModelSource,
    block_size: int,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    fused_layers: bool = True,
    num_tokens: int,
    num_rows: int,
) -> list[RankSize]:
    """The largest rank of each stage. `num_tokens`, `num_rows`: of the largest step.

    Raises UnsupportedModel as the load does for what a config tells.
    """
    is_divided = max(tensor_parallel_size, pipeline_parallel_size, data_parallel_size) > 1
    if is_divided:
        check_divisible(source.config, source.quantization, source.load_format)
    num_layers, observed = source.config.get_text_config(decoder=True).num_hidden_layers, _observe(source)
    found = []
    for stage in range(pipeline_parallel_size):
        model = on_meta(source)
        plan = plan_place(
            model,
            heads=(0, tensor_parallel_size) if tensor_parallel_size > 1 else None,
            stage=(stage, pipeline_parallel_size) if pipeline_parallel_size > 1 else None,
            mlps=(0, data_parallel_size) if data_parallel_size > 1 else None,
        )
        plan.reduce(model)
        num_kv_heads = observed.num_kv_heads if plan.shards is None else plan.shards.local_kv_heads
        own_layers = plan.num_layers(num_layers)
        layout = KVLayout(own_layers, num_kv_heads, observed.head_dim, block_size, source.dtype, source.stored)
        loading = 0 if not is_divided and _stays_in_file(source) else _bytes_of(model)
        largest = max(parameter.nbytes for parameter in model.parameters())
        step = _step_bytes(source, observed, plan, num_tokens, num_rows)
        held = _held_bytes(model, source, plan, observed, fused_layers=fused_layers)
        if source.device.type == "cpu":
            loading = max(loading, held) + _COPIES_TO_PACK * largest
        found.append(RankSize(loading, held, step, layout, observed.num_kv_heads))
    return found


def least_bytes(source: ModelSource, *, fused_layers: bool) -> int:
    """The bytes of weights that a rank of `source` holds at least once it has loaded them. 0 if the config does not
    tell, as of quantized weights on a GPU."""
    model = on_meta(source)
    plan = plan_part(model, source.ranks)
    plan.reduce(model)
    if source.device.type == "cpu" and (source.quantization != "none" or source.stored_format is not None):
        return _held_bytes(model, source, plan, _observe(source), fused_layers=fused_layers)
    is_known = source.load_format == "dummy" or stated_quantization(source.config) is None
    return _bytes_of(model) if is_known else 0


def _observe(source: ModelSource) -> ObservedLayers:
    num_layers = source.config.get_text_config(decoder=True).num_hidden_layers
    with FakeTensorMode(allow_non_fake_inputs=True):  # otherwise transformers reads the values of masks
        # Products of experts have shapes in this type alone.
        return observe_layers(on_meta(replace(source, dtype=torch.bfloat16)), num_layers, source.max_model_len)


def _bytes_of(model: PreTrainedModel) -> int:
    """Shared parameters, as of a tied head, count once."""
    sizes: list[int] = [parameter.nbytes for parameter in model.parameters()]
    return sum(sizes)


def _stays_in_file(source: ModelSource) -> bool:
    """Returns whether a whole model's weights have the checkpoint's type: they are then mapped, not copied."""
    config = source.config
    named = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    return source.stored_format is None and DTYPES.get(str(named).removeprefix("torch.")) == source.dtype


def _step_bytes(source: ModelSource, observed: ObservedLayers, plan: PartPlan, num_tokens: int, num_rows: int) -> int:
    """Activations of one layer and of the residual stream, and what sampling takes on ranks with logits."""
    text, has_head = source.config.get_text_config(decoder=True), plan.stage is None or plan.stage.is_last
    experts = getattr(text, "num_experts_per_tok", None) or 1
    intermediate = max(getattr(text, "intermediate_size", None) or 0, getattr(text, "moe_intermediate_size", None) or 0)
    heads = (text.num_attention_heads + observed.num_kv_heads) * observed.head_dim
    width = 6 * text.hidden_size + 2 * heads + 3 * (intermediate or 4 * text.hidden_size) * experts
    sampled = num_rows * observed.vocab_size * SAMPLED_BYTES if has_head else 0
    return int(num_tokens * width * source.dtype.itemsize + sampled)


# -- weights as they are packed ---------------------------------------------------------------------------------------


def _held_bytes(
    model: PreTrainedModel, source: ModelSource, plan: PartPlan, observed: ObservedLayers, *, fused_layers: bool
) -> int:
    """Raises UnsupportedModel if weights are to be rounded, which only the fused layers do, and the model has none."""
    if source.device.type != "cpu":
        return _checkpoint_bytes(source) or _bytes_of(model)
    own = own_modules(plan)
    packer = WeightPacker(source.quantization, dict(_stored_sizes(model, source)))
    try:
        if not fused_layers:
            raise NotFusable("the fused layers are off")
        params = observed.params if plan.stage is None else observed.params[: len(plan.stage.own_layers)]
        require_fusable(model, params, own, device="meta")
        return bytes_of_packed(decoder_weights(model, params, packer, own))
    except NotFusable as error:
        if source.quantization == "none":
            return _bytes_of(model)
        raise UnsupportedModel(
            f"{type(model).__name__}: quantization = {source.quantization} is not possible: {error}"
        ) from None


def bytes_of_packed(weights: DecoderWeights) -> int:
    tensors = [weights.embedding, weights.norm, *(each.bias for each in weights.linears)]
    for layer in weights.layers:
        tensors += [layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm]
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return held + sum(linear.nbytes for linear in weights.linears)


def _checkpoint_bytes(source: ModelSource) -> int:
    """The files of a quantized checkpoint, which a GPU holds as they are. 0 for other checkpoints. Raises
    UnsupportedModel if they are not there."""
    if source.load_format == "dummy" or (stated := stated_quantization(source.config)) is None:
        return 0
    files = list(Path(source.name).glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(
            f"{source.config.model_type}: on a GPU, weights quantized by {stated[0]} are as large as their files, and "
            f"{source.name} has none: name a directory with the weights"
        )
    return sum(file.stat().st_size for file in files)


def _stored_sizes(
    model: PreTrainedModel, source: ModelSource
) -> Iterator[tuple[torch.nn.Linear, Callable[[], IntegerWeight]]]:
    """The linear layers that are integers in the checkpoint, by its config. Its files may keep others as floats."""
    if (stored := source.stored_format) is None:
        return
    _, stated = stated_quantization(source.config) or ("", {})
    bits, skipped = _bits(stated), [*(stated.get("modules_to_not_convert") or ()), *(stated.get("ignore") or ())]
    has_zeros = stored.method == "awq" or not stated.get("sym", True)
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module is model.get_output_embeddings():
            continue
        if not any(path.endswith(name) for name in skipped):
            yield module, partial(_integers, module, bits, stored, has_zeros=has_zeros)


def _bits(stated: Mapping[str, Any]) -> int:
    groups = (stated.get("config_groups") or {}).values()
    return next(
        (int(each["weights"].get("num_bits", 8)) for each in groups),
        int(stated.get("bits") or stated.get("w_bit") or 4),
    )


def _integers(module: torch.nn.Linear, bits: int, stored: StoredFormat, *, has_zeros: bool) -> IntegerWeight:
    num_out, num_in = module.out_features, module.in_features
    group = stored.group_size or num_in
    scales = torch.empty(-(-num_in // group), num_out, dtype=torch.float16, device="meta")
    zeros = torch.empty_like(scales, dtype=torch.int8) if has_zeros else None
    codes = torch.empty(num_out, num_in, dtype=torch.int8, device="meta")
    return IntegerWeight(codes, scales, zeros, bits, group)
