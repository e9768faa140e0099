"""Which fields of a worker's configuration an embedded engine has."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from kvrelay.config.field_values import explanations, sentence
from kvrelay.config.worker import WorkerConfig

SETTINGS = (
    "dtype", "kv_cache_dtype", "load_format", "device", "cuda_graphs", "cuda_graph_sizes",
    "fused_layers", "quantization", "threads", "block_size", "num_blocks", "kv_memory_bytes", "memory_utilization",
    "max_model_len", "prefix_cache", "prefix_lookup", "token_budget", "max_running", "scheduler", "chunking",
    "queue_order", "retraction", "preemption", "swap_space", "new_token_ratio",
    "jump_forward", "speculation", "num_speculative_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size", "local_ranks", "rank_host", "rank_port", "rank_timeout_s",
    "curve_key_file",
)  # fmt: skip
"""docs/configuration.md says what each means. The others concern services."""


def engine_config(model: str | None, settings: Mapping[str, Any]) -> WorkerConfig:
    """The configuration of an engine. Raises ValueError for an unknown setting or a wrong value, by name."""
    for name in settings:
        if name not in SETTINGS:
            close = get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"the engine has no setting {name!r}{hint}")
    named = {} if model is None else {"model": model}
    try:
        return WorkerConfig(role="decode", **named, **settings)
    except ValidationError as error:
        name, given, fault = next(explanations(WorkerConfig, error))
        raise ValueError(sentence(f"{name} = {given!r}" if name else "", fault)) from None
