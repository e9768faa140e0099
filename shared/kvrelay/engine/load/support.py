"""Refuses models that the paged layout cannot hold, from the config, before the weights are read."""

from __future__ import annotations

import logging
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvrelay.engine.run.attention import UnsupportedModel

log = logging.getLogger(__name__)

_HELD_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(config: PreTrainedConfig) -> None:
    """Refuses models that a block cannot hold at any length.

    Raises:
        UnsupportedModel: with the reason.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not served")
    model_class = _causal_lm_class(config)
    if model_class is None:
        raise UnsupportedModel(f"{name}: transformers has no causal language model of this type")
    text = config.get_text_config(decoder=True)
    _check_layers(name, text, model_class)
    _check_heads(name, text)


def resolve_max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    """Returns the smaller of the requested length and the model's longest position, in tokens.

    Raises:
        ValueError: no length is requested and the config has none, or less than 1 is requested.
    """
    reach = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = [length for length in (requested, reach) if length is not None]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"max_model_len={requested} with max_position_embeddings={reach}: give a length of 1 or more")
    if requested is not None and reach is not None and requested > reach:
        log.warning("max_model_len is cut from %d to %d tokens, the model's max_position_embeddings", requested, reach)
    return int(min(lengths))


def _causal_lm_class(config: PreTrainedConfig) -> type[Any] | None:
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
    (dynamic NTK, longrope).

    Raises:
        UnsupportedModel: that can happen within `max_model_len` tokens.
    """
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
