"""Fused decoder layers against the modules of transformers: which models they take, and that the logits agree."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.backends.backend import AttentionParams, PackedRows, allocate_pool
from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.fused.kernel import DecoderKernel
from kvrelay.engine.fused.weights import FAMILIES, NotFusable, WeightPacker, decoder_weights, require_fusable
from kvrelay.engine.load import causal_model
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import ModelSource, open_source
from kvrelay.engine.parallel.model_part import RankGroups
from kvrelay.engine.run.attention import UnsupportedModel
from tests.tiny_models import ARCHITECTURES, build_model

BLOCK_SIZE = 16
FUSED = ("llama", "qwen2", "qwen3", "wide-qwen3", "mistral")


def load(directory: Path, *, dtype: str = "float32", fused: bool = True, kv_cache_dtype: str = "auto") -> CausalModel:
    source = open_source(str(directory), dtype, kv_cache_dtype=kv_cache_dtype)
    return load_model(source, BLOCK_SIZE, fused_layers=fused)


def run(model: CausalModel, prompts: list[torch.Tensor], chunks: list[int]) -> list[torch.Tensor]:
    """Logits of all positions, with all prompts of one length in the same step and in the same chunks."""
    length = len(prompts[0])
    num_blocks = -(-length // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(num_blocks * len(prompts)).astype(np.int32).reshape(len(prompts), -1)
    pool = allocate_pool(model.layout, tables.size, torch.device("cpu"))
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    start = 0
    for chunk in chunks:
        rows = PackedRows(
            np.full(len(prompts), chunk, np.int32), np.full(len(prompts), start, np.int32), block_tables=tables
        )
        ids = torch.cat([prompt[start : start + chunk] for prompt in prompts])
        positions = torch.from_numpy(rows.token_positions.astype(np.int64))
        with torch.inference_mode():
            hidden = model.hidden_states(ids, positions, model.backend.plan(pool, rows))
            logits = model.logits(hidden).float()
        for each, part in zip(found, logits.split(chunk), strict=True):
            each.append(part)
        start += chunk
    return [torch.cat(parts) for parts in found]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).mean()) for a, b in zip(found, expected, strict=True))


def random_prompts(count: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (length,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("chunks", [[90], [40, 33, 16, 1], [1] * 12])
def test_float32_logits_equal_the_modules(architecture: str, chunks: list[int], tmp_path: Path) -> None:
    build_model(architecture, tmp_path)
    fused, eager = load(tmp_path), load(tmp_path, fused=False)
    assert (fused.forward.name, eager.forward.name) == ("fused", "eager")
    prompts = random_prompts(3, sum(chunks))
    assert distance(run(fused, prompts, chunks), run(eager, prompts, chunks)) < 1e-5


@pytest.mark.parametrize("architecture", FUSED)
def test_bfloat16_is_no_further_from_float32_than_the_modules_are(architecture: str, tmp_path: Path) -> None:
    build_model(architecture, tmp_path)
    prompts, chunks = random_prompts(2, 80), [64, 15, 1]
    exact = run(load(tmp_path, fused=False), prompts, chunks)
    eager = distance(run(load(tmp_path, dtype="bfloat16", fused=False), prompts, chunks), exact)
    fused = load(tmp_path, dtype="bfloat16")
    assert fused.forward.name == "fused"
    assert distance(run(fused, prompts, chunks), exact) <= 1.1 * eager


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_logit(dtype: str, tmp_path: Path) -> None:
    """Also with more threads than cores, which sleep when they have to wait for long."""
    build_model("qwen3", tmp_path)
    model, prompts, chunks = load(tmp_path, dtype=dtype), random_prompts(3, 90), [67, 20, *[1] * 3]
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(torch.cat(run(model, prompts, chunks)))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_pool_of_8_bits_takes_the_fused_layers_too(tmp_path: Path) -> None:
    build_model("qwen3", tmp_path)
    prompts, chunks = random_prompts(2, 40), [36, 3, 1]
    fused = load(tmp_path, kv_cache_dtype="fp8_e4m3")
    eager = load(tmp_path, kv_cache_dtype="fp8_e4m3", fused=False)
    assert fused.forward.name == "fused"
    assert distance(run(fused, prompts, chunks), run(eager, prompts, chunks)) < 1e-2


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(FUSED)))
def test_other_families_keep_their_modules(architecture: str, tmp_path: Path) -> None:
    build_model(architecture, tmp_path)
    assert load(tmp_path).forward.name == "eager"


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("qwen3", True)])  # the first has biases
def test_packed_weights_leave_the_modules_and_return_to_them(architecture: str, tied: bool, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(build_model(architecture, tmp_path))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    before = model(torch.arange(20)[None]).logits
    embeddings = model.get_input_embeddings().weight.detach().clone()
    packer = WeightPacker()
    weights = decoder_weights(model, [AttentionParams(1.0)] * model.config.num_hidden_layers, packer)
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert {module.weight.numel() for module in modules} == {0}
    assert torch.equal(DecoderKernel(weights).embed(torch.arange(9)), embeddings[:9])
    packer.restore()
    assert torch.equal(model(torch.arange(20)[None]).logits, before)


def test_layers_that_deviate_are_refused_and_the_modules_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_model("qwen3", tmp_path)
    prompts = random_prompts(1, 20)
    expected = run(load(tmp_path, fused=False), prompts, [20])

    def deviate(self: FusedForward, token_ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.ones(len(token_ids), 128)

    monkeypatch.setattr(FusedForward, "hidden_states", deviate)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert model.forward.name == "eager" and "its fused layers are off by" in caplog.text
    assert torch.equal(run(model, prompts, [20])[0], expected[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("activation", "gelu"),
        ("sinks", "sinks"),
        ("linear", "not a plain linear layer"),
        ("dtype", "float16"),
        ("epsilon", "epsilons"),
        ("rotary", "rotates"),
        ("family", "Odd is not one of"),
    ],
)
def test_what_the_kernels_do_not_compute_is_named(change: str, reason: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_model("llama", tmp_path))
    params = AttentionParams(1.0, sinks=torch.zeros(4) if change == "sinks" else None)
    match change:
        case "activation":
            model.config.hidden_act = "gelu"
        case "linear":
            odd = type("QuantizedLinear", (torch.nn.Linear,), {})
            model.model.layers[1].mlp.down_proj = odd(192, 128)
        case "dtype":
            model.half()
        case "epsilon":
            model.model.norm.variance_epsilon = 0.5
        case "rotary":
            model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:8]
        case "family":
            model.__class__ = type("Odd", (type(model),), {})
    assert type(model).__name__ in FAMILIES or change == "family"
    with pytest.raises(NotFusable, match=reason):
        require_fusable(model, [params] * 2)


# -- the switch for logits that do not depend on the batch -------------------------------------------------------------


def with_ranks(source: ModelSource, device: torch.device) -> ModelSource:
    group: Any = SimpleNamespace(in_agreement=nullcontext)
    return replace(source, ranks=RankGroups(tensor_parallel=group), device=device)


def with_dynamic_angles(source: ModelSource) -> ModelSource:
    config: Any = deepcopy(source.config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return replace(source, config=config)


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("change", "fused", "message"),
    [
        (lambda source: source, False, "they are off"),
        (with_dynamic_angles, True, "rotary embeddings of type 'dynamic'"),
        (lambda source: replace(source, device=GPU), True, "on GPUs, attention holds it in 16 bits"),
        (lambda source: with_ranks(source, GPU), True, "NCCL sums over ranks"),
    ],
    ids=["modules", "angles", "float32 on a GPU", "NCCL"],
)
def test_models_whose_logits_depend_on_the_batch_are_refused_before_they_are_read(
    change: Any, fused: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_model, "_read", lambda *_: pytest.fail("weights were read"))
    source = open_source(str(build_model("llama", tmp_path)))
    with pytest.raises(UnsupportedModel, match=f"batch_invariant: .*{message}"):
        load_model(change(source), BLOCK_SIZE, fused_layers=fused, batch_invariant=True)


def test_models_of_other_families_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_model, "_read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedModel, match="GemmaForCausalLM is not one of LlamaForCausalLM"):
        load_model(open_source(str(build_model("gemma", tmp_path))), BLOCK_SIZE, batch_invariant=True)


def test_a_cpu_holds_it_by_its_fused_layers_or_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(build_model("llama", tmp_path)))
    causal_model._check_batch_invariant(with_ranks(source, source.device), fused_layers=True)
    caplog.set_level(logging.INFO)
    assert load_model(source, BLOCK_SIZE, batch_invariant=True).forward.name == "fused"
    assert causal_model.MAY_VARY not in caplog.text

    def refuse(*_: Any) -> None:
        raise NotFusable("its attention has sinks")

    monkeypatch.setattr(causal_model, "require_fusable", refuse)
    with pytest.raises(UnsupportedModel, match="batch_invariant is not possible: its attention has sinks"):
        load_model(source, BLOCK_SIZE, batch_invariant=True)
