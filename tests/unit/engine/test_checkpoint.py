"""Files that are not what a model needs: the model runs with all of its own weights, or is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from tests.unit.engine.driving import run, start

Weights = dict[str, torch.Tensor]
Change = Callable[[Path], None]


@pytest.fixture
def copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model's directory of the test's own."""
    return shutil.copytree(model_dir("llama"), tmp_path / "model")


def load(directory: Path) -> TransformersRunner:
    return make_runner(str(directory), dtype="float32", num_blocks=16)


def greedy(runner: TransformersRunner) -> list[int]:
    (sequence,) = start(runner, [list(range(40, 75))], Sampling(temperature=0), num_output=8)
    run(runner, [sequence])
    return sequence.output


def change_config(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_weights(edit: Callable[[Weights], Weights]) -> Change:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(edit(load_file(path)), path, metadata={"format": "pt"})

    return change


def without(part: str) -> Change:
    return change_weights(lambda weights: {name: each for name, each in weights.items() if part not in name})


def cut(num_bytes: int) -> Change:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("lm_head"), r"lacks 1 tensors .* lm_head\.weight"),
        (without("layers.1.mlp.up_proj"), r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"),
        (without("model.norm"), r"lacks 1 tensors .* model\.norm\.weight"),
        (change_config(num_hidden_layers=3), r"lacks 9 tensors .* model\.layers\.2\."),
        (
            change_weights(lambda weights: {f"module.{name}": each for name, each in weights.items()}),
            "lacks 21 tensors",
        ),
        (change_config(vocab_size=400), r"lm_head\.weight: \[320, 128\] in the checkpoint, \[400, 128\] by the config"),
        (change_config(num_key_value_heads=1), r"k_proj\.weight: \[64, 128\] in the checkpoint, \[32, 128\]"),
        (change_config(num_attention_heads=3), "config cannot be read.*not a multiple"),
        (change_config(num_hidden_layers="2"), "config cannot be read.*expected int"),
        (change_config(rope_parameters={"rope_type": "yarn"}), "config cannot be read.*factor"),
        (change_config(rope_parameters={"rope_type": "of_another_world"}), "cannot be loaded.*of_another_world"),
        (change_config(hidden_act="of_another_world"), "cannot be loaded.*of_another_world"),
        (change_config(quantization_config={"quant_method": "of_another_world"}), "quantized by 'of_another_world'"),
        (change_config(quantization_config={"bits": 4}), "quantized by None"),
        (cut(0), "cannot be loaded"),
        (cut(1000), "cannot be loaded"),
        (cut(-1000), "cannot be loaded"),
    ],
)
def test_what_would_run_with_other_weights_than_its_own_is_refused(change: Change, reason: str, copy: Path) -> None:
    change(copy)
    with pytest.raises(UnsupportedModel, match=reason):
        load(copy)


EIGHT_BITS = torch.float8_e4m3fn


def stored_as(dtype: torch.dtype, *more: str) -> Change:
    """The first layers' weights in another type, and more tensors beside them."""

    def edit(weights: Weights) -> Weights:
        changed = {name: each.to(dtype) if "layers.0.mlp" in name else each for name, each in weights.items()}
        return {**changed, **{name: torch.ones(1) for name in more}}

    return change_weights(edit)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        stored_as(torch.int8),
        stored_as(torch.int8, "model.layers.0.mlp.up_proj.weight_scale"),
        stored_as(EIGHT_BITS, "model.layers.0.mlp.up_proj.weight_scale"),
        stored_as(EIGHT_BITS, "model.layers.0.mlp.up_proj.weight_scale_inv"),
        stored_as(EIGHT_BITS, "model.layers.0.mlp.up_proj.input_scale", "model.layers.0.self_attn.k_scale"),
    ],
)
def test_weights_that_are_scaled_and_nothing_says_so_are_refused(change: Change, shards: bool, copy: Path) -> None:
    change(copy)
    if shards:
        shutil.move(copy / "model.safetensors", copy / "model-00001-of-00001.safetensors")
        names = load_file(copy / "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\..* does not say how it is quantized"):
        load(copy)


@pytest.mark.parametrize(
    "change",
    [
        stored_as(EIGHT_BITS),
        stored_as(EIGHT_BITS, "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.kv_scale"),
        stored_as(torch.bfloat16, "model.layers.0.mlp.up_proj.input_scale"),
        change_weights(lambda weights: {**weights, "model.layers.0.bias.weight": torch.ones(3, dtype=torch.int8)}),
    ],
)
def test_what_stands_for_itself_is_served(change: Change, copy: Path) -> None:
    change(copy)
    reference: Any = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    tokens = torch.arange(40, 75)[None]
    expected = reference.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy(load(copy)) == expected[0, 35:].tolist()


def test_what_a_config_wants_of_outputs_does_not_matter(copy: Path, model_dir: Callable[[str], Path]) -> None:
    change_config(return_dict=False, output_hidden_states=True, output_attentions=True)(copy)
    assert greedy(load(copy)) == greedy(load(model_dir("llama")))


def test_a_lost_shard_is_named(copy: Path) -> None:
    into_shards(copy)
    sorted(copy.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(OSError, match="model-00002-of"):
        load(copy)


def test_tensors_that_the_model_does_not_use_are_named(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(lambda weights: {**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(128)})(copy)
    with caplog.at_level(logging.WARNING, "kvrelay"):
        load(copy)
    assert "does not use 1 tensors of the checkpoint: model.layers.0.self_attn.q_proj.bias" in caplog.text


def into_shards(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2


def into_bin(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def forget_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").unlink()


def forget_prefix(directory: Path) -> None:
    """As files of a model without its head name them."""
    change_weights(lambda weights: {name.removeprefix("model."): each for name, each in weights.items()})(directory)


@pytest.mark.parametrize("change", [into_shards, into_bin, forget_generation_config, forget_prefix])
def test_other_forms_of_the_same_weights_give_the_same_tokens(
    change: Change, copy: Path, model_dir: Callable[[str], Path]
) -> None:
    change(copy)
    runner = load(copy)
    assert greedy(runner) == greedy(load(model_dir("llama")))
    assert runner.spec.eos_token_ids == (256,)


def test_weights_of_16_bits_are_computed_in_the_type_asked_for(copy: Path) -> None:
    change_weights(lambda weights: {name: each.bfloat16() for name, each in weights.items()})(copy)
    change_config(dtype="bfloat16")(copy)
    reference: Any = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    tokens = torch.arange(40, 75)[None]
    expected = reference.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    runner = load(copy)
    assert runner.spec.dtype == "float32"
    assert greedy(runner) == expected[0, 35:].tolist()


@pytest.mark.parametrize(
    ("stated", "taken"),
    [([3, 256], (3, 256)), (7, (7, 256)), (-1, (256,)), ([256, 320, 99_999], (256,)), (0, (0, 256)), (None, (256,))],
)
def test_ends_are_those_of_the_configs_and_the_tokenizer_that_are_tokens(
    stated: int | list[int] | None, taken: tuple[int, ...], copy: Path
) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert load(copy).spec.eos_token_ids == taken
    change_config(eos_token_id=None)(copy)
    assert load(copy).spec.eos_token_ids == taken  # the tokenizer names 256 as well


def test_code_beside_a_model_is_not_run_and_nobody_is_asked(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the terminal is asked")

    monkeypatch.setattr("builtins.input", ask)
    (copy / "configuration_own.py").write_text("raise SystemExit('run')")
    change_config(model_type="own", auto_map={"AutoConfig": "configuration_own.Own"})(copy)
    with pytest.raises(ValueError, match="custom code"):
        open_source(str(copy))
