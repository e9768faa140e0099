"""The fused forward for GPUs, with its pieces in plain torch, against the modules of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.backends.backend import KVLayout
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.fused.gpu_forward import (
    GPU_DTYPES,
    GpuForward,
    MergedLinear,
    TorchPieces,
    merge,
    merge_weights,
)
from kvrelay.engine.fused.weights import NotFusable
from kvrelay.engine.load.causal_model import choose_pieces
from kvrelay.engine.load.probe import (
    TOLERANCE,
    ForwardCheck,
    ObservedLayers,
    computing_in_float32,
    observe_layers,
    own_logits,
    random_prompts,
)
from kvrelay.engine.run.attention import ATTENTION_NAME, UnsupportedModel, register
from tests.tiny_models import build_model

LENGTH = 160
FUSED = ("llama", "qwen2", "qwen3", "wide-qwen3", "mistral")


def read(directory: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, ObservedLayers, KVLayout]:
    register()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=ATTENTION_NAME)
    observed = observe_layers(model.eval(), model.config.num_hidden_layers, LENGTH)
    return model, observed, KVLayout(observed.num_layers, observed.num_kv_heads, observed.head_dim, 16, observed.dtype)


def error(model: PreTrainedModel, observed: ObservedLayers, layout: KVLayout) -> float:
    """Of the fused logits, relative to the modules' own; in long and short chunks."""
    check = ForwardCheck(model, LENGTH)
    forward = GpuForward(merge_weights(model, observed.params, LENGTH), TorchPieces())
    return check.measure(forward, layout, TorchBackend())


@pytest.mark.parametrize("architecture", FUSED)
def test_float32_logits_equal_the_modules(architecture: str, tmp_path: Path) -> None:
    assert error(*read(build_model(architecture, tmp_path), torch.float32)) < 1e-5


@pytest.mark.parametrize("dtype", [dtype for dtype in GPU_DTYPES if dtype != torch.float32])
def test_sixteen_bit_logits_are_as_near_as_rounding_allows(dtype: torch.dtype, tmp_path: Path) -> None:
    assert error(*read(build_model("qwen3", tmp_path, dtype=dtype), dtype)) < 3e-2


def test_a_deep_model_may_differ_by_what_16_bits_cost_its_modules(tmp_path: Path) -> None:
    """Of large weights: each layer doubles the rounding errors of those before it."""
    model, observed, layout = read(build_model("llama", tmp_path, dtype=torch.bfloat16), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.8)
    check = ForwardCheck(model, LENGTH)
    weights = merge_weights(model, observed.params, LENGTH)
    forward = GpuForward(weights, TorchPieces())
    if check.measure(forward, layout, TorchBackend()) <= TOLERANCE[torch.bfloat16]:
        pytest.fail("the weights are too small for this test")
    check.run(forward, layout, TorchBackend(), model=model)
    with pytest.raises(UnsupportedModel, match="are off by"):
        check.run(forward, layout, TorchBackend())
    wrong = GpuForward(replace(weights, norm_eps=weights.norm_eps + 1.0), TorchPieces())
    with pytest.raises(UnsupportedModel, match="are off by"):
        check.run(wrong, layout, TorchBackend(), model=model)


def test_modules_compute_in_float32_with_weights_of_16_bits(tmp_path: Path) -> None:
    model, _, _ = read(build_model("qwen2", tmp_path, dtype=torch.bfloat16), torch.bfloat16)
    prompts, before = random_prompts(model, (20, 5)), [each.data_ptr() for each in model.parameters()]
    with torch.inference_mode(), computing_in_float32(model):
        found = own_logits(model, prompts)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert [each.data_ptr() for each in model.parameters()] == before
    with torch.inference_mode():
        expected = own_logits(model.float(), prompts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_modules_compute_as_before_once_their_weights_are_merged(tmp_path: Path) -> None:
    model, observed, _ = read(build_model("qwen2", tmp_path), torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = merge_weights(model, observed.params, LENGTH)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    shared: Any = model.model.layers[0].self_attn.k_proj.weight
    assert shared.untyped_storage().data_ptr() == weights.layers[0].qkv.weight.untyped_storage().data_ptr()


def test_projections_of_which_only_some_have_a_bias_are_not_merged() -> None:
    with pytest.raises(NotFusable, match="some have none"):
        merge([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)])


def test_angles_that_depend_on_the_longest_position_are_not_fused(tmp_path: Path) -> None:
    model, observed, _ = read(build_model("llama", tmp_path), torch.float32)
    rotary: Any = model.model.rotary_emb
    rotary.rope_type = "dynamic"
    with pytest.raises(NotFusable, match="dynamic"):
        merge_weights(model, observed.params, LENGTH)


@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_invariant_products_of_a_token_have_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((70, 300), (129, 300), (129,)))
    pieces = choose_pieces(torch.device("cpu"), batch_invariant=True)
    for merged in (MergedLinear(weight, bias), MergedLinear(weight, None)):
        whole = pieces.linear(x, merged)
        torch.testing.assert_close(whole, TorchPieces().linear(x, merged), atol=0.3, rtol=1e-2)
        for first, last in ((0, 1), (69, 70), (3, 19), (5, 69), (8, 8)):
            assert torch.equal(pieces.linear(x[first:last], merged), whole[first:last])


def test_a_cpu_gets_the_pieces_in_torch() -> None:
    assert isinstance(choose_pieces(torch.device("cpu")), TorchPieces)
