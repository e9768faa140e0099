"""The `ModelSpec` of a model and its pool."""

from __future__ import annotations

from kvrelay.backends.backend import dtype_name
from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.engine.load.model_files import find_model_dir, fingerprint, shard_fingerprint
from kvrelay.engine.run.device import describe_device
from kvrelay.step.batch import ModelSpec
from kvrelay.tokenizer_identity import identity_of_file


def spec_of(model: CausalModel, num_blocks: int, num_host_slots: int, host_block_s: float) -> ModelSpec:
    """Returns the spec of a model with a pool of `num_blocks`. `host_block_s`: seconds that copying a block to the host
    takes."""
    layout, source = model.layout, model.source
    path, size = find_model_dir(source.name), 1 if model.part.shards is None else model.part.shards.size
    num_stages = 1 if model.part.stage is None else model.part.stage.num_stages
    identity = fingerprint(path, model.whole_layout, source.weights_salt)
    return ModelSpec(
        name=source.name,
        vocab_size=model.vocab_size,
        max_model_len=min(source.max_model_len, num_blocks * layout.block_size),
        eos_token_ids=model.eos_token_ids,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        dtype=dtype_name(layout.dtype),
        fingerprint=shard_fingerprint(identity, size, num_stages),
        num_host_slots=num_host_slots,
        host_block_s=host_block_s,
        device=describe_device(source.device),
        kv_dtype=dtype_name(layout.pool_dtype),
        tokenizer=identity_of_file(path / "tokenizer.json"),
        model_identity=identity,
        tensor_parallel_size=size,
        total_kv_heads=model.whole_layout.num_kv_heads,
        pipeline_parallel_size=num_stages,
        total_layers=model.whole_layout.num_layers,
    )
