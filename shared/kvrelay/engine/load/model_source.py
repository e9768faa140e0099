"""What to load: a model's directory or hub name, with its config read and checked, and `auto` resolved.

Models that the paged layout cannot hold are refused by their config, before the weights are read.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvrelay.backends.backend import KV_DTYPES
from kvrelay.engine.load.checkpoint import check_quantization, read_config
from kvrelay.engine.load.integer_weight import Quantization
from kvrelay.engine.load.stored_weights import StoredFormat, find_format, stated_quantization
from kvrelay.engine.parallel.model_part import ONE_PROCESS, RankGroups
from kvrelay.engine.run.attention import UnsupportedModel

log = logging.getLogger(__name__)

_HELD_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(config: PreTrainedConfig) -> None:
    """Refuses models that a block cannot hold at any length. Raises UnsupportedModel with the reason."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not served")
    model_class = causal_lm_class(config)
    if model_class is None:
        raise UnsupportedModel(f"{name}: transformers has no causal language model of this type")
    text = config.get_text_config(decoder=True)
    _check_layers(name, text, model_class)
    _check_heads(name, text)


def resolve_max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    """Returns the smaller of the requested length and the model's longest position, in tokens. Raises ValueError if no
    length is requested and the config has none, or less than 1 is requested."""
    reach = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = [length for length in (requested, reach) if length is not None]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"max_model_len={requested} with max_position_embeddings={reach}: give a length of 1 or more")
    if requested is not None and reach is not None and requested > reach:
        log.warning("max_model_len is cut from %d to %d tokens, the model's max_position_embeddings", requested, reach)
    return int(min(lengths))


def causal_lm_class(config: PreTrainedConfig) -> type[Any] | None:
    """The class of transformers that computes this model; None if there is none."""
    # transformers has no public way to find the class without building the model.
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _check_layers(name: str, text: PreTrainedConfig, model_class: type[Any]) -> None:
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModel(f"{name}: {model_class.__name__} does not let its attention be replaced")
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name}: recurrent or state-space layers keep a state that is not KV of tokens")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _HELD_LAYER_TYPES)
    if other:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(other)}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name}: {text.num_kv_shared_layers} layers share the KV of other layers")


def _check_heads(name: str, text: PreTrainedConfig) -> None:
    if getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedModel(f"{name}: multi-head latent attention keeps one compressed vector instead of K and V")


def check_positions(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuses position encodings that rescale all positions once the longest sequence of a batch exceeds a length
    (dynamic NTK, longrope). Raises UnsupportedModel if that can happen within `max_model_len` tokens."""
    name, text = config.model_type, config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = str(rope.get("rope_type", "default"))
        if "dynamic" not in rope_type and rope_type != "longrope":
            continue
        unscaled = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_model_len > unscaled:
            raise UnsupportedModel(
                f"{name}: {rope_type} scaling makes keys depend on the longest sequence of the batch beyond {unscaled} "
                f"tokens; serve it with max_model_len={unscaled} or less"
            )


LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint, or random values of the same shapes, which need no files but the config."""

DUMMY_SEED = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NATIVE_FLAGS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to load: a directory or a hub name, with its config read and checked."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    load_format: LoadFormat = "auto"
    stored: torch.dtype | None = None  # dtype of keys and values in the pool; None: as computed
    quantization: Quantization = "none"
    stored_format: StoredFormat | None = None  # format of integer weights that are read here
    ranks: RankGroups = ONE_PROCESS

    @property
    def weights_salt(self) -> str:
        """Returns a salt that separates random and rounded weights from the checkpoint's and from each other; empty for
        the checkpoint's."""
        parts = [f"dummy {DUMMY_SEED} {self.device.type}"] if self.load_format == "dummy" else []
        return " ".join([*parts, self.quantization] if self.quantization != "none" else parts)


def open_source(
    name: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    load_format: LoadFormat = "auto",
    kv_cache_dtype: str = "auto",
    quantization: Quantization = "none",
    ranks: RankGroups = ONE_PROCESS,
) -> ModelSource:
    """Reads and checks the config, and resolves `auto`.

    Raises:
        UnsupportedModel: the layout cannot hold the model.
        ValueError: an unknown dtype or kv_cache_dtype, or no length.
        OSError: there is no such model.
    """
    config = read_config(name)
    check_config(config)
    target = torch.device(device)
    stored_format = None
    if load_format != "dummy":
        check_quantization(config)
        # On other devices transformers loads them, with the packages that have kernels for these.
        stored_format = find_format(config) if target.type == "cpu" else None
    length = resolve_max_model_len(config, max_model_len)
    check_positions(config, length)
    if kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is none of auto, {', '.join(KV_DTYPES)}")
    computed = resolve_dtype(dtype, config, target)
    if quantization != "none" and target.type != "cpu":
        raise UnsupportedModel(f"quantization = {quantization}: only the CPU's fused layers round weights")
    if quantization != "none" and stored_format is not None:
        raise UnsupportedModel(
            f"quantization = {quantization}: the checkpoint is quantized already, by {stored_format.method}"
        )
    if ranks.all_ranks is not None:
        check_divisible(config, quantization, load_format)
    stored = KV_DTYPES.get(kv_cache_dtype)
    return ModelSource(name, config, computed, target, length, load_format, stored, quantization, stored_format, ranks)


def check_divisible(config: PreTrainedConfig, quantization: Quantization, load_format: LoadFormat) -> None:
    """Raises UnsupportedModel for weights that cannot be divided among ranks."""
    stated = stated_quantization(config) if load_format != "dummy" else None
    if quantization != "none" or stated is not None:
        method = quantization if stated is None else stated[0]
        raise UnsupportedModel(
            f"{config.model_type}: weights quantized by {method} are not divided among ranks, which take weights in 16 "
            f"or 32 bits"
        )


def resolve_dtype(requested: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto` is the checkpoint's, but float32 on CPUs without support for it. Raises
    ValueError for an unknown name."""
    if requested != "auto":
        if requested not in DTYPES:
            raise ValueError(f"dtype {requested!r} is none of auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    named = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    stored = DTYPES.get(str(named).removeprefix("torch."), torch.float32)
    if device.type == "cpu" and stored in _NATIVE_FLAGS and not _NATIVE_FLAGS[stored] & _cpu_flags():
        return torch.float32
    return stored


def _cpu_flags() -> frozenset[str]:
    """The CPU's feature names as Linux lists them. Elsewhere none, except the features that every Apple arm64 has."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset({"asimdhp"}) if platform.machine() == "arm64" else frozenset()
