"""How large everything is: in the real run, and in the tiny one that proves the benchmark's own code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.tiny_models import build_tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Scale:
    """Lengths in tokens, sizes in bytes."""

    name: str
    config: dict[str, Any]
    dtype: str
    repeats: int
    copy_bytes: int
    matmul_size: int
    batches: tuple[int, ...]
    context: int
    steps: int  # a repeat has so many
    prompt: int
    chunks: tuple[int, ...]
    loop_batch: int
    loop_steps: int
    transfer_pool_bytes: int
    transfer_bytes: tuple[int, ...]
    handoff_prompts: tuple[int, ...]
    requests: int
    request_prompt: int
    request_output: int
    served: tuple[int, int]  # tokens of a prompt and of an output of `serving`
    max_model_len: int = 8192

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.config["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        """Of keys, values and queries."""
        return int(self.config["hidden_size"]) // self.num_heads


FULL = Scale(
    name="Llama-3-8B's shape",
    config={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    dtype="bfloat16",
    repeats=5,
    copy_bytes=4 << 30,
    matmul_size=8192,
    batches=(1, 16, 64, 256),
    context=1024,
    steps=20,
    prompt=8192,
    chunks=(512, 1024, 2048, 4096, 8192),
    loop_batch=64,
    loop_steps=100,
    transfer_pool_bytes=2 << 30,
    transfer_bytes=(64 << 20, 256 << 20, 1 << 30),
    handoff_prompts=(512, 1024, 2048, 4096, 8000),
    requests=64,
    request_prompt=1024,
    request_output=128,
    served=(1024, 512),
)
SMOKE = Scale(
    name="a tiny model's shape",
    config={
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    dtype="float32",
    repeats=2,
    copy_bytes=4 << 20,
    matmul_size=128,
    batches=(1, 4),
    context=64,
    steps=2,
    prompt=256,
    chunks=(64, 256),
    loop_batch=4,
    loop_steps=10,
    transfer_pool_bytes=4 << 20,
    transfer_bytes=(1 << 20,),
    handoff_prompts=(64, 256),
    requests=4,
    request_prompt=64,
    request_output=8,
    served=(64, 8),
    max_model_len=1024,
)
SCALES = {"full": FULL, "smoke": SMOKE}


def write_model(scale: Scale, directory: Path) -> Path:
    """A config and a tokenizer: weights are made on the device (`load_format` dummy). Returns `directory`."""
    sizes = {"model_type": "llama", "tie_word_embeddings": False, **scale.config}
    AutoConfig.for_model(**sizes, dtype=scale.dtype, eos_token_id=2).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory
