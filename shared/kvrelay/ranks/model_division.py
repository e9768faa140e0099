"""Whether a model's sizes allow a number of ranks, by its config.json alone: before torch is imported and ranks are
started, which takes many seconds. What else a model needs is checked when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.kv.shard_map import ShardShape


def why_not_divided(model: str, tensor_parallel_size: int, pipeline_parallel_size: int) -> str:
    """Why the heads or layers of the model in this directory do not divide so. Empty if they do, if the config does not
    state their numbers, and for the name of a model on a hub."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        heads, kv_heads, layers = (
            text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        )
    except (OSError, ValueError, AttributeError):
        return ""
    size = tensor_parallel_size
    if isinstance(heads, int) and heads % size:
        return f"tensor_parallel_size = {size}: {heads} attention heads do not divide by it"
    if isinstance(kv_heads, int) and kv_heads > 0 and not ShardShape(size, kv_heads).is_even:
        return f"tensor_parallel_size = {size}: {kv_heads} KV heads do not divide by it, nor does it by them"
    if isinstance(layers, int) and layers < pipeline_parallel_size:
        return f"pipeline_parallel_size = {pipeline_parallel_size}: it has {layers} layers, and each stage needs one"
    return ""
