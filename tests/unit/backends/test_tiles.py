"""The kernels' products by AMX: compiled for a CPU that has it, and run in an emulation of its instructions."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.backends import cpu, cpu_build
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.fused import kernel as fused_kernel
from kvrelay.engine.load import causal_model
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from tests.fakes.waiting import PATIENCE_S
from tests.tiny_models import build_model
from tests.unit.backends.cases import AttentionCase
from tests.unit.engine.test_fused_forward import BLOCK_SIZE, distance, load, random_prompts, run
from tests.unit.engine.test_fused_kernels import assert_close, make_kernel, product

pytestmark = [pytest.mark.unit, pytest.mark.slow, pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")]


def compile_kernel(target: Path, *flags: str) -> None:
    source = Path(cpu_build.__file__).with_name("cpu_decoder.c")
    fixed = ["-std=gnu11", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-O1"]
    fixed.append("-Werror=implicit-function-declaration")
    subprocess.run(["gcc", *fixed, *flags, str(source), "-o", str(target), "-lm"], check=True, timeout=10 * PATIENCE_S)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The kernels with emulated tiles."""
    target = tmp_path_factory.mktemp("tiles") / "kernel.so"
    compile_kernel(target, "-march=native", "-DEMULATE_TILES", "-shared")
    cpu_build._load_torch_openmp()
    library = ctypes.CDLL(str(target))
    assert library.kvrelay_tiles() == 1
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu, fused_kernel, causal_model):
            patch.setattr(module, "load_kernel", lambda: library)
        yield library


def test_compiles_for_a_cpu_with_amx(tmp_path: Path) -> None:
    target = tmp_path / "kernel.s"
    compile_kernel(target, "-march=sapphirerapids", "-S")
    assert "tdpbf16ps" in target.read_text()


def test_the_check_at_load_accepts_right_sums(emulated: ctypes.CDLL) -> None:
    assert emulated.kvrelay_check_tiles() == 1
    assert emulated.kvrelay_tiles() == 1


@pytest.mark.parametrize("num_tokens", [2, 9, 16, 17, 33, 385])
@pytest.mark.parametrize("num_in", [32, 96, 512, 544, 1030])
def test_products_by_tiles(emulated: ctypes.CDLL, num_tokens: int, num_in: int) -> None:
    kernel, weights = make_kernel(torch.bfloat16, num_in=num_in, num_out=70)
    x = torch.randn(num_tokens, num_in).bfloat16()
    before = emulated.kvrelay_emulated_dots()
    found = kernel.products.linear(weights.linears[-1], x, torch.float32)
    assert_close(found, product(weights.linears[-1], x), torch.float32)
    assert emulated.kvrelay_emulated_dots() > before
    gate, up = product(weights.layers[0].gate_up, x).chunk(2, dim=1)
    assert_close(
        kernel.products.linear(weights.layers[0].gate_up, x), torch.nn.functional.silu(gate) * up, torch.bfloat16
    )


def test_one_token_takes_no_tiles(emulated: ctypes.CDLL) -> None:
    kernel, weights = make_kernel(torch.bfloat16, num_in=96, num_out=70)
    x = torch.randn(1, 96).bfloat16()
    before = emulated.kvrelay_emulated_dots()
    found = kernel.products.linear(weights.linears[-1], x, torch.float32)
    assert_close(found, product(weights.linears[-1], x), torch.float32)
    assert emulated.kvrelay_emulated_dots() == before


@pytest.mark.parametrize(("num_tokens", "num_in"), [(2, 288), (40, 544), (520, 64)])
def test_products_of_many_panels_by_tiles(emulated: ctypes.CDLL, num_tokens: int, num_in: int) -> None:
    kernel, weights = make_kernel(torch.bfloat16, num_in=num_in, num_out=600, intermediate=330)
    x = torch.randn(num_tokens, num_in).bfloat16()
    found = kernel.products.linear(weights.linears[-1], x, torch.float32)
    assert_close(found, product(weights.linears[-1], x), torch.float32)
    gate, up = product(weights.layers[0].gate_up, x).chunk(2, dim=1)
    assert_close(
        kernel.products.linear(weights.layers[0].gate_up, x), torch.nn.functional.silu(gate) * up, torch.bfloat16
    )


@pytest.mark.parametrize("architecture", ["llama", "wide-qwen3"])
def test_layers_by_tiles(emulated: ctypes.CDLL, architecture: str, tmp_path: Path) -> None:
    """What goes from one product to the next one in tiles is what goes there in rows without them."""
    build_model(architecture, tmp_path)
    model, prompts, chunks = load(tmp_path, dtype="bfloat16"), random_prompts(3, 71), [45, 17, 9]
    assert model.forward.name == "fused"
    by_tiles = run(model, prompts, chunks)
    try:
        assert emulated.kvrelay_use_tiles(0) == 0
        before = emulated.kvrelay_emulated_dots()
        assert distance(by_tiles, run(model, prompts, chunks)) < 1e-2
        assert emulated.kvrelay_emulated_dots() == before
    finally:
        assert emulated.kvrelay_use_tiles(1) == 1


def test_batch_invariant_logits_take_no_tiles(emulated: ctypes.CDLL, tmp_path: Path) -> None:
    source = open_source(str(build_model("qwen3", tmp_path)), "bfloat16")
    prompts, before = random_prompts(2, 71), emulated.kvrelay_emulated_dots()
    try:
        model = load_model(source, BLOCK_SIZE, batch_invariant=True)
        whole, cut = run(model, prompts, [71]), run(model, prompts, [1, 40, 1, 1, 28])
    finally:
        assert emulated.kvrelay_use_tiles(1) == 1
    assert emulated.kvrelay_emulated_dots() == before
    assert all(map(torch.equal, whole, cut))


@pytest.mark.parametrize("x", [0.0, -0.0, 100.0, -100.0, 1e-30, math.inf, math.nan])
def test_silu_of_special_values(emulated: ctypes.CDLL, x: float) -> None:
    kernel, weights = make_kernel(torch.bfloat16, num_in=32, num_out=32, intermediate=16)
    gated = weights.layers[0].gate_up
    gated.panels.zero_()
    gated.panels[:, 0, :, 0] = 1.0  # gate and up are the first input
    token = torch.zeros(1, 32, dtype=torch.bfloat16)
    token[0, 0] = x
    expected = torch.nn.functional.silu(token[:, :1].float()) * token[:, :1].float()
    found = kernel.products.linear(gated, token).float()
    torch.testing.assert_close(found, expected.expand(1, 16), atol=1e-30, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_by_tiles(emulated: ctypes.CDLL, head_dim: int, window: int | None) -> None:
    rows = [(0, 70), (90, 33), (200, 1), (5, 3)]
    case = AttentionCase(rows, group=3, head_dim=head_dim, dtype=torch.bfloat16, window=window)
    (ours, _), (theirs, _) = case.run(CpuBackend()), case.run(TorchBackend())
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
