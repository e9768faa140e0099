"""The sizes that a model's config gives are those of the model once it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.integer_weight import Quantization
from kvrelay.engine.load.model_source import ModelSource, open_source
from kvrelay.engine.load.rank_size import RankSize, bytes_of_packed, least_bytes, size_ranks
from kvrelay.engine.run.attention import EagerForward, UnsupportedModel

BLOCK_SIZE = 16


def sized(source: ModelSource, **ranks: Any) -> list[RankSize]:
    return size_ranks(source, BLOCK_SIZE, num_tokens=64, num_rows=8, **ranks)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["tied-llama", "qwen3"])
def test_packed_weights(architecture: str, quantization: Quantization, model_dir: Callable[[str], Path]) -> None:
    source = open_source(str(model_dir(architecture)), "float32", quantization=quantization)
    (found,) = sized(source)
    loaded = load_model(source, BLOCK_SIZE)
    assert isinstance(loaded.forward, FusedForward)
    assert found.held == bytes_of_packed(loaded.forward.weights) > loaded.forward.weight_bytes
    assert found.layout == loaded.layout
    assert least_bytes(source, fused_layers=True) == pytest.approx(found.held, rel=0.05)


@pytest.mark.parametrize("architecture", ["mixtral", "gemma2"])
def test_weights_of_modules(architecture: str, model_dir: Callable[[str], Path]) -> None:
    """Also of experts, whose layers the meta device computes in 16 bits alone."""
    source = open_source(str(model_dir(architecture)), "float32")
    (found,) = sized(source)
    loaded = load_model(source, BLOCK_SIZE, fused_layers=False)
    assert isinstance(loaded.forward, EagerForward)
    assert found.layout == loaded.layout
    assert found.held == sum(parameter.nbytes for parameter in loaded.forward.modules.parameters())


def test_ranks_have_parts_of_weights_and_kv(model_dir: Callable[[str], Path]) -> None:
    source = open_source(str(model_dir("qwen3")), "float32")
    (whole,) = sized(source)
    (head,) = sized(source, tensor_parallel_size=2)
    stages = sized(source, pipeline_parallel_size=2)
    assert whole.held / 2 <= head.held < 0.6 * whole.held
    assert head.layout == replace(whole.layout, num_kv_heads=whole.layout.num_kv_heads // 2)
    assert sum(stage.layout.num_layers for stage in stages) == whole.layout.num_layers
    assert whole.kv_of_all_heads == head.kv_of_all_heads == sum(stage.kv_of_all_heads for stage in stages)
    assert stages[0].step < stages[1].step == whole.step  # which samples


def test_what_a_load_refuses_is_refused(model_dir: Callable[[str], Path]) -> None:
    rounded = open_source(str(model_dir("mixtral")), "float32", quantization="int8")
    with pytest.raises(UnsupportedModel, match=r"quantization = int8 is not possible: .* is not one of"):
        sized(rounded)
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size = 3"):
        sized(open_source(str(model_dir("llama")), "float32"), tensor_parallel_size=3)
