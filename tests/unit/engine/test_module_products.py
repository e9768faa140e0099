"""Linear layers of models that run through the modules of transformers, by the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP

from kvrelay.backends.cpu_build import load_kernel
from kvrelay.engine.fused.panels import pack, rows_of
from kvrelay.engine.load.causal_model import load_model, numerics_of
from kvrelay.engine.load.model_source import open_source
from tests.tiny_models import ARCHITECTURES, randomize
from tests.unit.engine.test_fused_forward import random_prompts, run


def config_of(name: str) -> PreTrainedConfig:
    """Of a width at which no thread's part of an activation ends within vectors: torch takes another formula there."""
    config = ARCHITECTURES[name]() if name in ARCHITECTURES else GPT2Config(**GPT2)
    config.intermediate_size = 256
    config.tie_word_embeddings = name != "gemma3"
    return config


GPT2: dict[str, Any] = {"vocab_size": 319, "n_embd": 128, "n_layer": 2, "n_head": 4, "eos_token_id": 0}


def model_of(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    randomize(AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma", "gemma3", "gpt2"])
def test_modules_give_a_token_the_same_bits_in_every_cut(name: str, dtype: str, tmp_path: Path) -> None:
    """The head of two of them shares the weights of the embedding, which scales in one."""
    if load_kernel().kvrelay_tiles() and dtype == "bfloat16":
        pytest.skip("by AMX the number of rows decides how they are multiplied")
    model = load_model(open_source(str(model_of(name, tmp_path)), dtype), 16)
    prompt = random_prompts(1, 67)[0]
    (whole,) = run(model, [prompt], [67])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cut in ([1, 2, 3, 5, 7, 49], [60, *[1] * 7]):
            (logits,) = run(model, [prompt], cut)
            assert torch.equal(logits, whole), (threads, cut)


def test_products_by_torch_are_other_numerics(tmp_path: Path) -> None:
    source = open_source(str(model_of("gemma", tmp_path)), "float32")
    assert numerics_of(load_model(source, 16)) != numerics_of(load_model(source, 16, fused_layers=False))


def test_modules_that_read_their_weights_compute_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = model_of("gemma", tmp_path)
    monkeypatch.setattr(GemmaMLP, "forward", lambda mlp, x: mlp.down_proj(x @ mlp.up_proj.weight.t()))
    caplog.set_level("INFO", "kvrelay.engine.load.causal_model")
    model = load_model(open_source(str(path), "float32"), 16)
    assert "products by torch" in caplog.text
    prompt = random_prompts(1, 40)[0]
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(run(model, [prompt], [40])[0], own(prompt[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_packed_weights_are_those_that_were_packed(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 45).to(dtype)
    rows = torch.tensor([0, 69, 31, 32, 31])
    assert torch.equal(rows_of(pack([weight], None), rows), weight[rows])
