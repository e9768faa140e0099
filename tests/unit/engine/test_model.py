"""What is loaded and how, and what is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPTJConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from kvrelay.backends.backend import AttentionParams, KVLayout, PackedRows, StepAttention
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.load import model_source as model_module
from kvrelay.engine.load.causal_model import load_model, make_dummy
from kvrelay.engine.load.model_files import fingerprint
from kvrelay.engine.load.model_source import open_source, resolve_dtype, resolve_max_model_len
from kvrelay.engine.load.probe import _check_mask
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.attention import UnsupportedModel, _paged_attention_forward
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from tests.unit.engine.driving import run, start

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def save_config(config: PreTrainedConfig, directory: Path) -> str:
    config.save_pretrained(directory)
    return str(directory)


def save_model(config: PreTrainedConfig, directory: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(), "state-space"),
        (JambaConfig(), "state-space"),
        (Qwen3NextConfig(), "state"),
        (T5Config(), "encoder-decoder"),
        (DeepseekV3Config(), "latent attention"),
        (Gemma3nTextConfig(), "share the KV"),
        (Llama4TextConfig(), "chunked_attention"),
        (GPTJConfig(), "attention be replaced"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_a_block_cannot_hold_is_refused_before_weights_are_read(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        open_source(save_config(config, tmp_path), max_model_len=128)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(**SMALL), "neither causal nor a sliding window"),
        (DiffLlamaConfig(**SMALL), "attends twice"),
        (Gemma4TextConfig(**SMALL, **GEMMA4), "head shapes differ"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_a_forward_shows_is_refused(config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(save_model(config, tmp_path), num_blocks=4)


def test_unequal_keys_and_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_check_heads", lambda *_: None)
    changes = {"num_key_value_heads": 4, "first_k_dense_replace": 4}
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = DeepseekV3Config(**{**SMALL, **changes, **sizes})
    with pytest.raises(UnsupportedModel, match="unequal"):
        make_runner(save_model(config, tmp_path), num_blocks=4)


def test_longrope_is_served_up_to_where_it_starts_to_scale(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        **SMALL,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "longrope", **factors},
    )
    name = save_config(config, tmp_path)
    with pytest.raises(UnsupportedModel, match="max_model_len=64"):
        open_source(name)
    assert open_source(name, max_model_len=64).max_model_len == 64


def test_dynamic_scaling_is_refused_beyond_the_length_it_starts_at(tmp_path: Path) -> None:
    dynamic = rope(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64)
    name = save_config(LlamaConfig(**SMALL, max_position_embeddings=256, **dynamic), tmp_path)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        open_source(name)


class _WithoutWindow(TorchBackend):
    """A backend that forgets the sliding window."""

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        step = super().plan(pool, rows)
        attend = step.attend

        class Step:
            def attend(
                self,
                layer: int,
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                params: AttentionParams,
            ) -> torch.Tensor:
                return attend(layer, query, key, value, AttentionParams(scaling=params.scaling))

        return Step()


def test_a_difference_from_the_models_own_attention_is_refused(model_dir: Callable[[str], Path]) -> None:
    source = open_source(str(model_dir("mistral")), "float32")
    load_model(source, 16, TorchBackend())
    with pytest.raises(UnsupportedModel, match="is off by"):
        load_model(source, 16, _WithoutWindow())


def test_masks_are_compared_with_what_the_layer_asks_for() -> None:
    window = sliding_window_causal_mask_function(8)
    _check_mask(0, causal_mask_function, None, 1000)
    _check_mask(0, window, 8, 1000)
    for mask, asked in ((window, None), (window, 9), (causal_mask_function, 8)):
        with pytest.raises(UnsupportedModel, match="layer 0"):
            _check_mask(0, mask, asked, 1000)
    chunked = chunked_causal_mask_function(512, torch.zeros(1, dtype=torch.int))
    with pytest.raises(UnsupportedModel):
        _check_mask(0, chunked, None, 1000)
    with pytest.raises(UnsupportedModel, match="of its own"):
        _check_mask(0, torch.ones(4, 4), None, 1000)


def test_an_unknown_attention_argument_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        _paged_attention_forward(torch.nn.Linear(1, 1), q, q, q, None, position_bias=torch.zeros(1))


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        (torch.bfloat16, {"avx512_bf16"}, torch.bfloat16),
        (torch.bfloat16, {"avx2"}, torch.float32),
        (torch.float16, {"avx512_bf16"}, torch.float32),
        (torch.float32, set(), torch.float32),
    ],
)
def test_auto_is_the_checkpoints_dtype_where_the_cpu_has_it(
    stored: torch.dtype, flags: set[str], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "_cpu_flags", lambda: frozenset(flags))
    config = LlamaConfig(**SMALL, dtype=stored)
    assert resolve_dtype("auto", config, CPU) == expected
    assert resolve_dtype("auto", config, torch.device("cuda")) == stored
    assert resolve_dtype("float16", config, CPU) == torch.float16
    with pytest.raises(ValueError, match="float8"):
        resolve_dtype("float8", config, CPU)


def test_the_spec_says_what_the_services_need(model_dir: Callable[[str], Path]) -> None:
    name = str(model_dir("gemma"))
    spec = make_runner(name, num_blocks=7, block_size=8).spec
    assert (spec.name, spec.vocab_size, spec.eos_token_ids) == (name, 320, (256,))
    assert spec.max_model_len == 7 * 8  # what the pool holds, if the model could do more
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (2, 1, 32)
    assert (spec.block_size, spec.num_blocks, spec.dtype) == (8, 7, "float32")


def test_random_weights_need_a_config_alone_and_are_the_same_in_every_process(tmp_path: Path) -> None:
    name = save_config(LlamaConfig(**SMALL), tmp_path)
    before = torch.random.get_rng_state()
    first, second = (make_runner(name, num_blocks=8, load_format="dummy") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.spec.fingerprint == second.spec.fingerprint
    tokens = []
    for runner in (first, second):
        (sequence,) = start(runner, [[5, 6, 7]], Sampling(temperature=0.0, max_tokens=20), num_output=20)
        run(runner, [sequence])
        tokens.append(sequence.output)
    assert tokens[0] == tokens[1]
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    assert make_runner(name, num_blocks=8).spec.fingerprint != first.spec.fingerprint
    salted = make_runner(name, num_blocks=8, load_format="dummy").spec.fingerprint
    assert salted != make_runner(name, num_blocks=8).spec.fingerprint, "a worker with the weights is no partner of it"


def test_a_second_model_of_a_source_does_not_change_how_the_first_attends(tmp_path: Path) -> None:
    source = open_source(save_config(LlamaConfig(**SMALL), tmp_path), load_format="dummy")
    prompt = [5, 6, 7, 8]
    outputs = []
    model = load_model(source, 16)
    for _ in range(2):
        runner = TransformersRunner(model, 8)
        (sequence,) = start(runner, [prompt], Sampling(temperature=0.0, max_tokens=20), num_output=20)
        run(runner, [sequence])
        outputs.append(sequence.output)
        other = make_dummy(source, "eager").eval()
    assert outputs[0] == outputs[1]
    got = other.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert outputs[0] == got[0, len(prompt) :].tolist()


def test_a_length_may_be_smaller_than_the_models_but_not_larger(model_dir: Callable[[str], Path]) -> None:
    name = str(model_dir("llama"))
    assert open_source(name, max_model_len=100).max_model_len == 100
    assert open_source(name, max_model_len=10**6).max_model_len == 2048
    with pytest.raises(ValueError, match="max_model_len=0"):
        open_source(name, max_model_len=0)


def test_fingerprints_tell_models_layouts_and_tokenizers_apart(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout(2, 2, 32, 16, torch.float32)
    original = model_dir("llama")
    copy = shutil.copytree(original, tmp_path / "copy")
    (copy / "README.md").write_text("not part of the model")
    assert fingerprint(copy, layout) == fingerprint(original, layout)
    seen = {
        fingerprint(original, layout),
        fingerprint(model_dir("qwen2"), layout),
        fingerprint(original, KVLayout(2, 2, 32, 32, torch.float32)),
        fingerprint(original, KVLayout(2, 2, 32, 16, torch.bfloat16)),
    }
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"x")
    seen.add(fingerprint(copy, layout))
    (copy / "tokenizer_config.json").write_text("{}")
    seen.add(fingerprint(copy, layout))
    monkeypatch.setattr("kvrelay.engine.load.model_files._WHOLE_BYTES", 0)
    seen |= {fingerprint(original, layout), fingerprint(copy, layout)}
    assert len(seen) == 8


def test_a_length_beyond_the_models_positions_is_cut_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(max_position_embeddings=512)
    assert resolve_max_model_len(config, 512) == 512
    assert caplog.messages == []
    assert resolve_max_model_len(config, 600) == 512
    assert caplog.messages == ["max_model_len is cut from 600 to 512 tokens, the model's max_position_embeddings"]


def test_a_length_beyond_the_pool_is_cut_and_reported(
    model_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = str(model_dir("llama"))
    assert make_runner(model, num_blocks=128, num_threads=1).spec.max_model_len == 2048
    assert not [message for message in caplog.messages if "is cut" in message]
    assert make_runner(model, num_blocks=10, num_threads=1).spec.max_model_len == 160
    (message,) = [message for message in caplog.messages if "is cut" in message]
    assert message.startswith("max_model_len is cut from 2048 to 160 tokens, which the pool's 10 blocks of 16 hold")
    assert "raise kv_memory_bytes" in message
    # What is asked for beyond the positions needs no room.
    assert make_runner(model, num_blocks=128, num_threads=1, max_model_len=10_000).spec.max_model_len == 2048
