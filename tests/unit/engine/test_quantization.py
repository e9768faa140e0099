"""Weights in 8 and 4 bits: their rounding, products with them, and models that are loaded with them."""

from __future__ import annotations

import logging
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.engine.fused.kernel import PanelProducts
from kvrelay.engine.fused.panels import order, pack
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.integer_weight import Quantization, quantize
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.attention import UnsupportedModel
from tests.thoroughness import examples
from tests.tiny_models import build_model
from tests.unit.engine.test_fused_forward import distance, random_prompts, run

METHODS = st.sampled_from(("int8", "int4"))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))


def rounded(rows: torch.Tensor, method: Quantization) -> torch.Tensor:
    """The weights that codes and scales stand for, in float64."""
    codes, scales, group = quantize(rows, method)
    spread = scales.t().repeat_interleave(group, dim=1)[:, : rows.shape[1]]
    return codes.double() * spread.double()


@settings(max_examples=examples(30), deadline=None)
@given(method=METHODS, num_rows=st.integers(1, 40), num_in=st.integers(1, 200))
def test_rounded_weights_are_near(method: Quantization, num_rows: int, num_in: int) -> None:
    rows = torch.randn(num_rows, num_in)
    rows[0] = 0.0
    codes, scales, group = quantize(rows, method)
    assert codes.abs().max() <= (127 if method == "int8" else 8)
    assert torch.equal(rounded(rows, method)[0], torch.zeros(num_in, dtype=torch.float64))
    # Codes are the nearest, except of weights beyond the largest code.
    spread = scales.t().float().repeat_interleave(group, dim=1)[:, :num_in]
    error = (rounded(rows, method) - rows.double()).abs()
    inside = codes.abs() < (127 if method == "int8" else 7)
    assert bool((error <= spread * 0.5001)[inside].all())
    squared = float(error.square().mean().sqrt() / rows.square().mean().sqrt().clamp(min=1e-9))
    assert squared < (0.02 if method == "int8" else 0.2)


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=DTYPES,
    method=METHODS,
    num_tokens=st.sampled_from((1, 2, 5, 13, 40)),
    num_in=st.one_of(st.integers(1, 200), st.sampled_from((576, 1030))),
    num_out=st.integers(1, 75),
    gated=st.booleans(),
)
def test_products_with_rounded_weights(
    dtype: torch.dtype, method: Quantization, num_tokens: int, num_in: int, num_out: int, gated: bool
) -> None:
    try:
        products = PanelProducts(dtype)
    except KernelBuildError as error:
        pytest.skip(str(error))
    weights = [torch.randn(num_out, num_in).to(dtype) for _ in range(1 + gated)]
    packed = pack(weights, None, gated=gated, quantization=method)
    x = torch.randn(num_tokens, num_in).to(dtype)
    expected = functional.linear(x.double(), rounded(order(weights, gated=False), method))[:, : num_out * (1 + gated)]
    if gated:
        expected = functional.silu(expected[:, :num_out]) * expected[:, num_out:]
    found = products.linear(packed, x)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert float((found.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(("method", "most"), [("int8", 0.51), ("int4", 0.27)])
def test_rounded_weights_take_a_half_or_a_quarter_of_bfloat16(method: Quantization, most: float) -> None:
    weight = torch.randn(96, 512).bfloat16()
    assert pack([weight], None, quantization=method).nbytes < most * weight.nbytes


def load(directory: Path, method: Quantization) -> CausalModel:
    return load_model(open_source(str(directory), "float32", quantization=method), 16)


def test_a_model_with_rounded_weights_is_near_and_says_what_that_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model("qwen3", tmp_path)
    prompts = random_prompts(2, 40)
    exact = run(load(tmp_path, "none"), prompts, [39, 1])
    with caplog.at_level(logging.INFO):
        errors = [distance(run(load(tmp_path, method), prompts, [39, 1]), exact) for method in ("int8", "int4")]
    assert 1e-4 < errors[0] < 0.05 and errors[0] < errors[1] < 0.5
    for method in ("int8", "int4"):
        assert f"quantization = {method}: over 256 tokens of text the KL divergence" in caplog.text


def test_without_a_tokenizer_the_cost_is_that_of_random_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model("llama", tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with caplog.at_level(logging.INFO):
        load(tmp_path, "int8")
    assert "its cost is measured with random tokens" in caplog.text and "KL divergence" in caplog.text


def test_models_without_fused_layers_are_refused(tmp_path: Path) -> None:
    source = open_source(str(build_model("llama", tmp_path / "llama")), "float32", quantization="int8")
    with pytest.raises(UnsupportedModel, match="int8 is not possible: the fused layers are off"):
        load_model(source, 16, fused_layers=False)
    build_model("gemma", tmp_path / "gemma")
    with pytest.raises(UnsupportedModel, match=r"int4 is not possible: .* is not one of"):
        load(tmp_path / "gemma", "int4")


def test_workers_with_other_weights_do_not_hand_over_to_each_other(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    salts = {open_source(str(tmp_path), quantization=method).weights_salt for method in ("none", "int8", "int4")}
    assert len(salts) == 3
