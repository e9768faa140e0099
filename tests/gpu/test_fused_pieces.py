"""Triton's kernels of a layer against the same in plain torch, and the fused forward on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.engine.fused.gpu_forward import MergedLinear, TorchPieces
from kvrelay.engine.load.causal_model import choose_pieces, load_model
from kvrelay.engine.load.model_source import open_source
from tests.gpu.conftest import KERNELS_TIMEOUT_S, skip_without_flashinfer
from tests.gpu.reference import errors, own_logits, paged_logits, prompts, read_model, sixteen_bit_backend
from tests.tiny_models import build_model

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def check_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (37, 96), (300, 5120)])
def test_sums_norms_and_activations(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> None:
    pieces, oracle = choose_pieces(device), TorchPieces()
    assert pieces.name == ("triton" if device.type == "cuda" else "torch")
    hidden = randn(tokens, width, dtype=torch.float32, device=device)
    delta, norm = (randn(*shape, dtype=dtype, device=device) for shape in ((tokens, width), (width,)))
    for added in (None, delta):
        sums = hidden.clone(), hidden.clone()
        found, expected = pieces.add_and_norm(sums[0], added, norm, EPS), oracle.add_and_norm(sums[1], added, norm, EPS)
        check_near(found, expected, dtype)
        check_near(*sums, torch.float32)
    gate_up = randn(tokens, 2 * width, dtype=dtype, device=device)
    check_near(pieces.silu_and_multiply(gate_up), oracle.silu_and_multiply(gate_up), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_in", "num_out"), [(4096, 6144), (96, 200), (300, 129)])
def test_a_row_of_an_invariant_product_has_the_same_bits_beside_any_others(
    device: torch.device, dtype: torch.dtype, num_in: int, num_out: int
) -> None:
    if device.type == "cpu" and num_in > 1000:
        pytest.skip("row by row, it takes a minute")
    pieces = choose_pieces(device, batch_invariant=True)
    assert pieces.name == ("triton" if device.type == "cuda" else "torch")
    tokens = 2500 if device.type == "cuda" else 70  # more than one group of tiles
    x = randn(tokens, num_in, dtype=dtype, device=device)
    weight = randn(num_out, num_in, dtype=dtype, device=device)
    for bias in (None, randn(num_out, dtype=dtype, device=device)):
        merged = MergedLinear(weight, bias)
        whole = pieces.linear(x, merged)
        check_near(whole, TorchPieces().linear(x, merged), dtype)
        for count in (1, 2, 15, 16, 17, 63, 64, 65, tokens - 1):
            for first in {0, 1, tokens - count}:
                assert torch.equal(pieces.linear(x[first : first + count], merged), whole[first : first + count])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((9, 3), 64), ((3, 1), 80)])
def test_norms_and_rotations_of_heads(
    device: torch.device, dtype: torch.dtype, normed: bool, heads: tuple[int, int], head_dim: int
) -> None:
    tokens, length = 50, 200
    qkv = randn(tokens, sum(heads) + heads[1], head_dim, dtype=dtype, device=device)
    norms = [randn(head_dim, dtype=dtype, device=device) for _ in range(2)]
    turns = randn(length, head_dim // 2, dtype=torch.float32, device=device)
    positions = torch.randint(0, length, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    found, expected = qkv.clone(), qkv.clone()
    for each, pieces in ((found, choose_pieces(device)), (expected, TorchPieces())):
        pieces.norm_and_rotate(
            each, (norms[0], norms[1]) if normed else None, (turns.cos(), turns.sin()), positions, heads, EPS
        )
    check_near(found, expected, dtype)
    assert torch.equal(found[:, sum(heads) :], qkv[:, sum(heads) :]), "values stay as they were"


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_the_fused_forward_is_as_near_to_float32_as_the_modules_are(device: torch.device, tmp_path: Path) -> None:
    skip_without_flashinfer(device)
    directory = build_model("wide-qwen3", tmp_path, dtype=torch.bfloat16)
    given = prompts(5, 100)
    exact = [own_logits(read_model(directory, torch.float32, device), prompt) for prompt in given]
    found = {}
    for fused in (False, True):
        source = open_source(str(directory), "bfloat16", device)
        model = load_model(source, 16, sixteen_bit_backend(device), fused_layers=fused)
        assert device.type == "cpu" or model.forward.name == ("fused" if fused else "eager")
        found[fused] = errors(paged_logits(model, given), exact).mean
    assert found[True] <= 1.1 * found[False]
