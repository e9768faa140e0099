"""Other models than those of `tiny_models`: each computes what transformers computes, or says why it does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvrelay.engine.make import make_runner
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.protocol.sampling import Sampling
from tests.tiny_models import SLIDING_WINDOW, randomize
from tests.unit.engine.driving import run, start

BLOCK_SIZE = 8
PROMPT_LENGTHS = (1, BLOCK_SIZE, 3 * SLIDING_WINDOW + 5, 37)
NUM_OUTPUT = 12
NEARLY_EQUAL = 1e-4
"""Of logits: so close, rounding may choose either token. One that attends wrongly is behind by 0.1 and more."""

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OLD_SIZES: dict[str, Any] = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOW: dict[str, Any] = {"sliding_window": SLIDING_WINDOW}


def config(name: str, **changes: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return made


def old_config(name: str, **changes: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = getattr(transformers, f"{name}Config")(**{**OLD_SIZES, **changes})
    return made


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}}


SERVED: dict[str, PreTrainedConfig] = {
    "heads of 80": config("Llama", head_dim=80),
    "heads of 96": config("Llama", head_dim=96),
    "heads of 112": config("Llama", head_dim=112),
    "heads of 6": config("Llama", head_dim=6),
    "heads of 512": config("Llama", head_dim=512),
    "one kv head, tied": config("Llama", num_key_value_heads=1, tie_word_embeddings=True),
    "biases": config("Llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama3 scaling": config(
        "Llama",
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "yarn scaling": config("Qwen2", **rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "linear scaling": config("Llama", **rope("linear", factor=4.0)),
    "part of each head rotated": config("Phi", partial_rotary_factor=0.5),
    "windows in later layers": config("Qwen2", **WINDOW, use_sliding_window=True, max_window_layers=1),
    "Mixtral": config("Mixtral", **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": config("Qwen2Moe", **EXPERTS, num_experts=4, shared_expert_intermediate_size=48),
    "Qwen3-MoE": config("Qwen3Moe", **EXPERTS, num_experts=4, mlp_only_layers=[1]),
    "Phi-3": config("Phi3", **WINDOW, partial_rotary_factor=0.75),
    "Phi-MoE": config("Phimoe", num_local_experts=4),
    "OLMo 2": config("Olmo2"),
    "OLMo 3": config("Olmo3", **WINDOW),
    "Granite": config("Granite", logits_scaling=8.0, attention_multiplier=0.02, embedding_multiplier=12.0),
    "Granite-MoE": config("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "StableLM": config("StableLm", partial_rotary_factor=0.25, use_qkv_bias=True, use_parallel_residual=True),
    "GPT-2": old_config("GPT2", scale_attn_by_inverse_layer_idx=True),
    "GPT-BigCode": old_config("GPTBigCode", multi_query=True),
    "GPT-NeoX": config("GPTNeoX"),
    "OPT": config("OPT", ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False),
    "Starcoder2": config("Starcoder2", **WINDOW),
    "Cohere": config("Cohere", use_qk_norm=True),
    "Cohere2": config("Cohere2", **WINDOW, num_hidden_layers=4),
    "SmolLM3": config("SmolLM3", no_rope_layers=[1, 0, 1]),
    "GLM-4": config("Glm4", head_dim=32),
    "GLM-4-MoE": config("Glm4Moe", **EXPERTS, head_dim=32, n_routed_experts=4, first_k_dense_replace=1),
    "gpt-oss": config("GptOss", **WINDOW, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "EXAONE 4": config("Exaone4", **WINDOW, num_hidden_layers=4, sliding_window_pattern=4),
    "Nemotron": config("Nemotron"),
    "ERNIE 4.5": config("Ernie4_5"),
    "Seed-OSS": config("SeedOss", head_dim=32),
    "Gemma 3, tied": config("Gemma3Text", **WINDOW, head_dim=32, tie_word_embeddings=True),
}


@pytest.mark.everyday(12)
@pytest.mark.parametrize("name", SERVED)
def test_each_greedy_token_is_the_models_own(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomize(AutoModelForCausalLM.from_config(SERVED[name], dtype=torch.float32))
    model.save_pretrained(tmp_path)
    num_blocks = sum(-(-(length + NUM_OUTPUT) // BLOCK_SIZE) for length in PROMPT_LENGTHS)
    runner = make_runner(str(tmp_path), dtype="float32", num_blocks=num_blocks, block_size=BLOCK_SIZE)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, runner.spec.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    sequences = start(runner, prompts, Sampling(temperature=0), NUM_OUTPUT)
    run(runner, sequences)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    for sequence in sequences:
        with torch.inference_mode():
            logits = own(torch.tensor([sequence.tokens[:-1]])).logits[0, len(sequence.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < NEARLY_EQUAL


@pytest.mark.parametrize("name", ["Falcon", "Bloom", "Mpt", "GPTNeo"])
def test_models_whose_attention_cannot_be_replaced_are_refused_whatever_length_is_asked_for(
    name: str, tmp_path: Path
) -> None:
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="does not let its attention be replaced"):
        make_runner(str(tmp_path), num_blocks=4)
