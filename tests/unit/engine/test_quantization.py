"""Weights in 8 and 4 bits: their rounding, products with them, and models that are loaded with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from torch.nn import functional

from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.engine.fused.kernel import PanelProducts
from kvrelay.engine.fused.panels import pack_integers
from kvrelay.engine.fused.weights import WeightPacker
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.integer_weight import Quantization, quantize
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.attention import UnsupportedModel
from tests.thoroughness import examples
from tests.tiny_models import build_model
from tests.unit.engine.test_fused_forward import distance, random_prompts, run

DEMO_MODEL = Path(__file__).parents[3] / "models" / "demo"
METHODS = st.sampled_from(("int8", "int4"))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))


def rounded(rows: torch.Tensor, method: Quantization) -> torch.Tensor:
    """The weights that codes, scales and zero points stand for, in float64."""
    return quantize(rows, method).dequantize(torch.float64)


@settings(max_examples=examples(30), deadline=None)
@given(method=METHODS, dtype=DTYPES, num_rows=st.integers(2, 40), num_in=st.integers(1, 200))
def test_rounded_weights_are_near(method: Quantization, dtype: torch.dtype, num_rows: int, num_in: int) -> None:
    rows = torch.randn(num_rows, num_in).to(dtype)
    rows[0] = 0.0
    found = quantize(rows, method)
    most = 127 if method == "int8" else 7
    assert found.bits == (8 if method == "int8" else 4) and int(found.codes.short().abs().max()) <= most + 1
    assert torch.equal(rounded(rows, method)[0], torch.zeros(num_in, dtype=torch.float64))
    # Codes are the nearest, except of weights beyond the least and the largest code.
    spread = found.scales.t().double().repeat_interleave(found.group, dim=1)[:, :num_in]
    error = (rounded(rows, method) - rows.double()).abs()
    inside = (found.codes < most) & (found.codes > -most - 1)
    assert bool((error <= spread * 0.5001)[inside].all())
    squared = float(error.square().mean().sqrt() / rows.double().square().mean().sqrt().clamp(min=1e-9))
    assert squared < (0.02 if method == "int8" else 0.12)


def symmetric(rows: torch.Tensor, group: int = 64) -> torch.Tensor:
    """Rounded to 15 or 16 levels around 0 that hold the largest weight of a group, or most of it."""
    groups = functional.pad(rows, (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    tries = []
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7):
        scales = (groups.abs().amax(dim=2, keepdim=True) * share / 7).clamp(min=1e-30)
        tries.append((groups / scales).round().clamp(-8, 7) * scales)
    errors = torch.stack([(each - groups).square().sum(dim=2, keepdim=True) for each in tries])
    best = errors.argmin(dim=0, keepdim=True).expand(1, *groups.shape)
    return torch.stack(tries).gather(0, best)[0].flatten(1)[:, : rows.shape[1]]


def demo_weights() -> Iterator[torch.Tensor]:
    for name, weight in load_file(DEMO_MODEL / "model.safetensors").items():
        if "proj" in name:
            yield weight.float()


def heavy_tailed() -> Iterator[torch.Tensor]:
    """Weights some of which are many times as large as most, some around another mean than 0."""
    generator = torch.Generator().manual_seed(0)
    for power in (1.0, 2.0, 3.0):
        rows = torch.randn(64, 576, generator=generator)
        yield rows.sign() * rows.abs() ** power
        yield (rows + 2.0).abs()


@pytest.mark.parametrize(("weights", "most"), [(demo_weights, 0.008), (heavy_tailed, 0.016)])
def test_four_bits_lose_little_of_weights_and_less_than_symmetric_ones(
    weights: Callable[[], Iterator[torch.Tensor]], most: float
) -> None:
    for weight in weights():
        error, size = (rounded(weight, "int4") - weight).square().mean(), weight.square().mean()
        assert error < most * size
        assert error < 0.75 * (symmetric(weight) - weight).square().mean()


def test_four_bits_are_near_the_best_grid() -> None:
    rows = torch.randn(200, 32, generator=torch.Generator().manual_seed(1)).double()
    found = (rounded(rows.float(), "int4") - rows).square().sum(dim=1)
    best = torch.full((200,), torch.inf, dtype=torch.float64)
    widths = (rows.amax(dim=1) - rows.amin(dim=1))[:, None] / 15
    for zero in range(16):
        for share in torch.linspace(0.5, 1.1, 400):
            scales = widths * share
            error = (((rows / scales).round().clamp(-zero, 15 - zero) * scales) - rows).square().sum(dim=1)
            best = torch.minimum(best, error)
    assert float(found.mean()) < 1.03 * float(best.mean())


def test_important_inputs_lose_less() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, importance = torch.randn(300, 576, generator=generator), torch.ones(576)
    importance[::32] = 100.0
    plain = (rounded(weight, "int4") - weight).square().mean(dim=0)
    weighted = (quantize(weight, "int4", importance).dequantize(torch.float64) - weight).square().mean(dim=0)
    assert weighted[::32].mean() < 0.5 * plain[::32].mean()
    assert weighted.mean() < 1.5 * plain.mean()


def test_a_norm_takes_what_its_weights_are_multiplied_by() -> None:
    norm, modules = torch.nn.RMSNorm(64), [torch.nn.Linear(64, 8), torch.nn.Linear(64, 24)]
    norm.weight.data.uniform_(0.5, 2.0)
    x, importance = torch.randn(5, 64), torch.rand(64) ** 4
    expected = [module(norm(x)) for module in modules]
    packer = WeightPacker("int4")
    packer.importance = dict.fromkeys(modules, importance)
    packer.balance(norm, *modules)
    for module, before in zip(modules, expected, strict=True):
        assert torch.allclose(module(norm(x)), before, atol=1e-5)
        assert packer.importance[module].max() / packer.importance[module].min() < importance.max() / importance.min()


def test_rounding_depends_on_the_row_alone() -> None:
    weight = torch.randn(77, 200)
    whole = quantize(weight, "int4")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        parts = [quantize(part, "int4") for part in weight.split((1, 16, 60))]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.scales for part in parts], dim=1), whole.scales)
    assert torch.equal(torch.cat([part.zero_points for part in parts], dim=1), whole.zero_points)


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
    packed = pack_integers([quantize(each, method) for each in weights], None, dtype, gated=gated)
    x = torch.randn(num_tokens, num_in).to(dtype)
    expected = functional.linear(x.double(), rounded(torch.cat(weights), method))
    if gated:
        expected = functional.silu(expected[:, :num_out]) * expected[:, num_out:]
    found = products.linear(packed, x)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert float((found.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=DTYPES,
    method=METHODS,
    num_in=st.one_of(st.integers(1, 200), st.just(1030)),
    num_tokens=st.integers(2, 30),
)
def test_a_row_has_the_same_bits_among_few_and_many(
    dtype: torch.dtype, method: Quantization, num_in: int, num_tokens: int
) -> None:
    products = PanelProducts(dtype)
    if "AMX" in products.instructions and dtype == torch.bfloat16:
        pytest.skip("AMX adds up one row in another order than several")
    packed = pack_integers([quantize(torch.randn(40, num_in), method)], None, dtype)
    x = torch.randn(num_tokens, num_in).to(dtype)
    whole = products.linear(packed, x)
    for count in range(1, min(num_tokens, 13)):
        assert torch.equal(products.linear(packed, x[:count]), whole[:count])


@pytest.mark.parametrize(("method", "most"), [("int8", 0.51), ("int4", 0.3)])
def test_rounded_weights_take_a_half_or_a_quarter_of_bfloat16(method: Quantization, most: float) -> None:
    weight = torch.randn(96, 512).bfloat16()
    assert pack_integers([quantize(weight, method)], None, torch.bfloat16).nbytes < most * weight.nbytes


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
