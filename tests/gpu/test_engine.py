"""The engine on a GPU against transformers on the same GPU: tokens in float32, logits in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import make_runner
from kvrelay.protocol.sampling import Sampling
from tests.gpu.conftest import KERNELS_TIMEOUT_S, skip_without_flashinfer
from tests.gpu.reference import (
    bfloat16_tolerance,
    errors,
    greedy,
    own_logits,
    paged_logits,
    prompts,
    read_model,
    sixteen_bit_backend,
)
from tests.tiny_models import ARCHITECTURES, build_model
from tests.unit.engine import driving

NUM_OUTPUT = 24


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_float32_tokens_are_those_of_transformers(device: torch.device, architecture: str, tmp_path: Path) -> None:
    """Through torch's SDPA, which stands in for FlashInfer where that knows no float32."""
    directory = build_model(architecture, tmp_path)
    given = prompts(6, 90)
    runner = make_runner(str(directory), dtype="float32", device=device, num_blocks=80, backend=TorchBackend())
    reference = read_model(directory, torch.float32, device)
    sequences = driving.start(runner, given, Sampling(temperature=0.0, max_tokens=NUM_OUTPUT), NUM_OUTPUT)
    driving.run(runner, sequences)
    assert [sequence.output for sequence in sequences] == [greedy(reference, prompt, NUM_OUTPUT) for prompt in given]


def test_float32_draws_do_not_depend_on_the_batch(device: torch.device, tmp_path: Path) -> None:
    runner = make_runner(str(build_model("qwen3", tmp_path)), dtype="float32", device=device, num_blocks=80)
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=7, max_tokens=NUM_OUTPUT)
    given = prompts(5, 60)
    together = driving.start(runner, given, sampling, NUM_OUTPUT)
    driving.run(runner, together, seed=1)
    for index, prompt in enumerate(given):
        alone = driving.Driven((f"alone-{index}", 0, index), prompt, sampling, NUM_OUTPUT, together[index].blocks)
        runner.add_sequence(alone.key, sampling, prompt, len(prompt))
        driving.run(runner, [alone], seed=index + 2)
        assert alone.output == together[index].output


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_logits_over_8_bits_are_near_those_over_16_in_any_schedule(device: torch.device, tmp_path: Path) -> None:
    skip_without_flashinfer(device)
    directory = str(build_model("wide-qwen3", tmp_path, dtype=torch.bfloat16))
    given = prompts(5, 100)
    by_type = {}
    for name in ("auto", "fp8_e4m3"):
        source = open_source(directory, "bfloat16", device, kv_cache_dtype=name)
        model = load_model(source, 16, sixteen_bit_backend(device))
        by_type[name] = [paged_logits(model, given, seed) for seed in (0, 1)]
    cost = errors(by_type["fp8_e4m3"][0], by_type["auto"][0])
    apart = errors(*by_type["fp8_e4m3"])
    print(f"relative errors of logits: of 8 bits {cost}, of another schedule {apart}")
    assert 5e-3 < cost.mean < 0.1
    assert apart.mean <= bfloat16_tolerance(model.layout.num_layers)


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
@pytest.mark.parametrize("architecture", ["mistral", "wide-qwen3"])
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    device: torch.device, architecture: str, tmp_path: Path
) -> None:
    """The reference computes in float32 with the weights that bfloat16 has: only computing differs, not the weights."""
    skip_without_flashinfer(device)
    directory = build_model(architecture, tmp_path, dtype=torch.bfloat16)
    model = load_model(open_source(str(directory), "bfloat16", device), 16, sixteen_bit_backend(device))
    given = prompts(5, 100)
    exact = [own_logits(read_model(directory, torch.float32, device), prompt) for prompt in given]
    theirs = errors([own_logits(read_model(directory, torch.bfloat16, device), prompt) for prompt in given], exact)
    ours = errors(paged_logits(model, given), exact)
    print(f"relative errors of logits: {ours}, of transformers' own {theirs}")
    assert ours.mean <= bfloat16_tolerance(model.layout.num_layers)
    assert ours.mean <= 1.25 * theirs.mean, "a mean over hundreds of positions does not differ by so much by chance"
